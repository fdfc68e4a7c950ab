"""Reading YAML and JSON documents into pydantic models, with errors a person can act on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

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

from transfer_queue.config.quantity import QUANTITY_HINT, Quantity
from transfer_queue.errors import ConfigError

__all__ = ["Bytes", "Document", "TerseDocument", "load_document", "parse_bytes", "validate_document"]

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


def validate_document(model: type[D], value: object, where: str) -> D:
    """``value`` as ``model``. Raises ConfigError whose one-line text names every wrong field by its path."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a mapping of settings, got {type(value).__name__}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_describe(model, item) for item in error.errors())) from None


def load_document(model: type[D], path: str | Path) -> D:
    """Read a YAML or JSON file as ``model``. Raises ConfigError.

    ``$(NAME)`` in a string stands for the environment variable NAME, as in Kubernetes manifests: the pods of one
    StatefulSet share a file and differ only in what the kubelet tells them.
    """
    try:
        value = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return validate_document(model, _expand(value, str(path)) if value is not None else {}, str(path))


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


def _describe(model: type[BaseModel], item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "document"
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown field; allowed here: {', '.join(_siblings(model, item['loc']))}"
    if item["type"] == "missing":
        return f"{path}: required"
    return f"{path}: {item['msg'].removeprefix('Value error, ')} (got {item['input']!r})"


def _siblings(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in location[:-1]:
        for name, info in current.model_fields.items():
            if part in (name, info.alias):
                current = info.annotation
        if not (isinstance(current, type) and issubclass(current, BaseModel)):
            return []
    return sorted(info.alias or name for name, info in current.model_fields.items())
