"""pydantic's JSON schema -> the structural schema that Kubernetes wants.

A structural schema has no references, no ``null`` type, no titles and no ``additionalProperties: false``: the apiserver
refuses unknown fields by itself. Defaults of objects are ``{}``: the apiserver then fills in the fields' own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

__all__ = ["structural"]

_KEPT = (
    "type",
    "format",
    "enum",
    "pattern",
    "minimum",
    "maxLength",
    "maxItems",
    "description",
    "required",
    "x-kubernetes-int-or-string",
    "x-kubernetes-validations",
)
_FREE_FORM: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}


def structural(model: type[BaseModel]) -> dict[str, Any]:
    """The structural schema of ``model``, with field names as in YAML."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _node(schema, schema.get("$defs", {}))


def _node(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        if name == "JsonValue":
            return dict(_FREE_FORM)
        schema = {**definitions[name], **{key: value for key, value in schema.items() if key != "$ref"}}
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    if "anyOf" in schema and "x-kubernetes-int-or-string" not in schema:
        (only,) = (choice for choice in schema["anyOf"] if choice.get("type") != "null")
        schema = {**_resolved(only, definitions), **{key: value for key, value in schema.items() if key != "anyOf"}}
    result = {key: schema[key] for key in _KEPT if key in schema}
    if "x-kubernetes-int-or-string" in schema:
        result["anyOf"] = schema["anyOf"]
    if "properties" in schema:
        result["properties"] = {name: _node(child, definitions) for name, child in schema["properties"].items()}
    elif isinstance(extra := schema.get("additionalProperties"), Mapping):
        child = _node(extra, definitions)
        result |= _FREE_FORM if child == _FREE_FORM else {"additionalProperties": child}
    if "items" in schema:
        result["items"] = _node(schema["items"], definitions)
    default = _default(schema.get("default"), result)
    if default is not None:
        result["default"] = default
    return result


def _default(value: Any, node: Mapping[str, Any]) -> Any:
    if not isinstance(value, Mapping):
        return None if value == [] else value
    filled = {name: child["default"] for name, child in node.get("properties", {}).items() if "default" in child}
    if not filled:
        return None  # nothing to fill in: the field stays out of the stored object
    # The apiserver tries rules on the default as it is written, before it fills in the fields' own.
    return filled if "x-kubernetes-validations" in node else {}


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    found: Mapping[str, Any] = definitions[reference.rsplit("/", 1)[1]] if reference else schema
    return found
