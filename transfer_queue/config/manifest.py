"""YAML in, readable refusals out: reading one document, and the one line that says what is wrong with a field."""

from __future__ import annotations

import difflib
import functools
import json
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from transfer_queue.errors import ConfigError

__all__ = ["explain", "single", "standard_input"]


class _StrictLoader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that is given twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f'key "{key.value}" already set (line {line})')
            seen.add(key.value)
        return typing.cast("dict[Any, Any]", super().construct_mapping(node, deep))


@functools.cache
def standard_input() -> str:
    """All of standard input. It is read once; later calls return the same text."""
    return sys.stdin.read()


def single(source: Path | str) -> Any:
    """The only YAML document of a file (``-``: standard input), or of a text if ``source`` has several lines."""
    if isinstance(source, str) and "\n" in source:
        name, text = "text", source
    elif str(source) == "-":
        name, text = "standard input", standard_input()
    else:
        name = str(source)
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"{name}: cannot be read: {reason}") from None
    try:
        found = [document for document in yaml.load_all(text, _StrictLoader) if document is not None]
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: is not YAML: {' '.join(str(error).split())}") from None
    if len(found) != 1:
        raise ConfigError(f"{name}: holds {len(found)} YAML documents; give exactly one TransferQueue")
    return found[0]


_TYPES: Final = {
    "int_type": "integer",
    "float_type": "number",
    "bool_type": "boolean",
    "string_type": "string",
    "list_type": "array",
    "dict_type": "object",
    "model_type": "object",
    "model_attributes_type": "object",
}


def explain(root: type[BaseModel], problem: ErrorDetails) -> str:
    """One line, worded as the apiserver words it, with the path of the field in front."""
    kind, given = problem["type"], problem["input"]
    location = [part for part in problem["loc"] if part not in {"str", "int", "constrained-str"}]
    path = _path(location)
    if kind == "extra_forbidden":
        return _unknown(root, location)
    if kind == "missing":
        return f"{path}: Required value"
    if kind == "literal_error":
        choices = ", ".join(f'"{value}"' for value in _allowed(root, location))
        hint = "; quote it: YAML reads a bare off as false" if given is False and '"off"' in choices else ""
        return f"{path}: Unsupported value: {_quote(given)}: supported values: {choices}{hint}"
    if kind == "string_pattern_mismatch":
        return f"{path}: Invalid value: {_quote(given)}: should match '{problem['ctx']['pattern']}'"
    if kind in _TYPES:
        return (
            f"{path}: {_quote(given)} must be of type {_TYPES[kind]}" if path else "a TransferQueue must be a mapping"
        )
    return f"{path}: {problem['msg']}"


def _unknown(root: type[BaseModel], location: Sequence[str | int]) -> str:
    parent = _model_at(root, location[:-1])
    names = [field.alias or name for name, field in parent.model_fields.items()] if parent else []
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f'unknown field "{_path(location)}"; {hint}allowed: {", ".join(sorted(names)) or "nothing"}'


def _path(location: Sequence[str | int]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _quote(value: Any) -> str:
    return json.dumps(value, default=str) if not isinstance(value, (dict, list)) else type(value).__name__


def _field_type(model: type[BaseModel], alias: str | int) -> Any:
    for name, field in model.model_fields.items():
        if alias in (field.alias, name):
            return field.annotation
    return None


def _type_at(root: type[BaseModel], location: Sequence[str | int]) -> Any:
    """The annotation of what is at ``location``; None where it leads nowhere."""
    found: Any = root
    for part in location:
        if isinstance(part, int):
            found = next(iter(typing.get_args(_member(found, lambda m: typing.get_origin(m) is list))), None)
        else:
            model = _member(found, _is_model)
            found = _field_type(model, part) if model else None
    return found


def _model_at(root: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel] | None:
    found: type[BaseModel] | None = _member(_type_at(root, location), _is_model)
    return found


def _member(annotation: Any, wanted: Callable[[Any], bool]) -> Any:
    """``annotation``, or the alternative of it, that is ``wanted``, without what is said of it by Annotated."""
    plain = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    if _is_union(plain):
        return next((found for member in typing.get_args(plain) if (found := _member(member, wanted))), None)
    return plain if wanted(plain) else None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _allowed(root: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    found = _member(_type_at(root, location), lambda member: typing.get_origin(member) is Literal)
    return [str(value) for value in typing.get_args(found)]
