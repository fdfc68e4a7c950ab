"""YAML and JSON documents as pydantic models, and the one line that says what is wrong with a field."""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from transfer_queue.config.quantity import QUANTITY_HINT, Quantity
from transfer_queue.errors import ConfigError

__all__ = [
    "Bytes",
    "Document",
    "TerseDocument",
    "Yaml",
    "document_paths",
    "explain",
    "load_document",
    "parse_bytes",
    "problems",
    "read_yaml",
    "standard_input",
    "validate_document",
    "wrong_type",
]

_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


class Document(BaseModel):
    """Base of all settings: camelCase in files, snake_case in Python, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    def dump(self) -> dict[str, Any]:
        """Plain values with the names used in files."""
        return self.model_dump(mode="json", by_alias=True)


class TerseDocument(Document):
    """Dumped without what is None: programs of before such a setting read files that do not use it."""

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


def parse_bytes(value: object) -> object:
    """``"64Gi"``, ``"500M"`` or a plain number of bytes -> int. Other values are left to the type check."""
    if not isinstance(value, str):
        return value
    try:
        return int(Quantity(value.strip()))
    except ValueError:
        raise ValueError(f"{value!r} {QUANTITY_HINT}") from None


Bytes = Annotated[int, BeforeValidator(parse_bytes)]

D = TypeVar("D", bound=Document)


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


@dataclass(frozen=True)
class Yaml:
    """A YAML document: ``value`` is what it holds, ``name`` where it is from."""

    name: str
    text: str
    value: Any

    def line(self, location: Sequence[str | int]) -> str:
        """`` (line 7)`` of the field at ``location``, or of what is nearest to it; empty where nothing is."""
        nodes = yaml.compose_all(self.text, _StrictLoader)
        node = next((node for node in nodes if getattr(node, "tag", "") != "tag:yaml.org,2002:null"), None)
        found = None
        for part in location:
            if isinstance(node, yaml.MappingNode):
                pair = next(((key, value) for key, value in node.value if key.value == part), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                pair = (node.value[part], node.value[part])
            else:
                pair = None
            if pair is None:
                break
            found, node = pair
        return "" if found is None else f" (line {found.start_mark.line + 1})"


def read_yaml(source: Path | str, what: str) -> Yaml:
    """The only YAML document of a file (``-``: standard input), or of a text if ``source`` has several lines.

    Raises ConfigError, also for a key that is set twice. ``what`` names in it what the document should be.
    """
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
        if (mark := getattr(error, "problem_mark", None)) is not None:
            line = "".join(text.splitlines()[mark.line : mark.line + 1])
            if "\t" in line[: len(line) - len(line.lstrip())]:
                raise ConfigError(f"{name}: is not YAML: line {mark.line + 1} has a tab: indent with spaces") from None
        raise ConfigError(f"{name}: is not YAML: {' '.join(str(error).split())}") from None
    if len(found) != 1:
        raise ConfigError(f"{name}: holds {len(found)} YAML documents; give exactly one {what}")
    return Yaml(name, text, found[0])


def validate_document(model: type[D], value: object, where: str, source: Yaml | None = None) -> D:
    """``value`` as ``model``.

    Raises ConfigError whose one-line text names every wrong field by its path, and by its line in ``source``.
    """
    if not isinstance(value, dict):
        raise ConfigError(wrong_type(where, value))
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(problems(model, error, source))}") from None


def problems(model: type[BaseModel], error: ValidationError, source: Yaml | None = None) -> list[str]:
    """One text for each wrong field, with its line in ``source``."""
    found = error.errors(include_url=False)
    return [explain(model, problem) + (source.line(problem["loc"]) if source else "") for problem in found]


def load_document(model: type[D], path: str | Path) -> D:
    """Read a YAML or JSON file as ``model``. Raises ConfigError.

    ``$(NAME)`` in a string stands for the environment variable NAME, as in Kubernetes manifests: the pods of one
    StatefulSet share a file and differ only in what the kubelet tells them.
    """
    source = read_yaml(Path(path), "mapping of settings")
    return validate_document(model, _expand(source.value, str(path)), str(path), source)


def _expand(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, where) for item in value]
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"{where}: {match[0]} names an environment variable that is not set")
        return os.environ[match[1]]

    return _VARIABLE.sub(variable, value)


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
        if not path:
            return f"a {root.__name__} must be a mapping"
        return wrong_type(path, given, _TYPES[kind]) + _as_mapping(root, location, given)
    message = problem["msg"].removeprefix("Value error, ")
    return f"{path}: {message}" + (f" (got {_quote(given)})" if problem["msg"].startswith("Input ") else "")


def wrong_type(path: str, given: object, wanted: str = "object") -> str:
    """The error of a value that has not the type ``wanted``, a name of JSON schema."""
    return f"{path}: {_quote(given)} must be of type {wanted}"


def _as_mapping(root: type[BaseModel], location: Sequence[str | int], given: object) -> str:
    """How to write a name that is given in place of the mapping that has it."""
    model = _model_at(root, location)
    if model is None or not isinstance(given, str):
        return ""
    inner = f"{given}: {{}}" if _member(_field_type(model, given), _is_model) else f"name: {given}"
    if inner.startswith("name: ") and _field_type(model, "name") is None:
        return ""
    return f"; write {location[-1]}: {{{inner}}}"


def _unknown(root: type[BaseModel], location: Sequence[str | int]) -> str:
    names = sorted(_names_in(root, location[:-1]))
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    above = [location[:depth] for depth in range(len(location) - 1)]
    below = [[*location[:-1], name] for name in names]
    places = [_path(place) for place in (*above, *below) if location[-1] in _names_in(root, place)]
    if places:
        hint = f"it belongs {'under ' if places[0] else 'to the top'}{' or '.join(filter(None, places))}; "
    return f'unknown field "{_path(location)}"; {hint}allowed: {", ".join(names) or "nothing"}'


def _names_in(root: type[BaseModel], location: Sequence[str | int]) -> set[str]:
    model = _model_at(root, location)
    return {field.alias or name for name, field in model.model_fields.items()} if model else set()


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


def document_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted path of each field of ``model`` and of the models in it, as files have them."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        inner = _member(field.annotation, _is_model)
        if inner is not None:
            yield from document_paths(inner, f"{path}.")


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
