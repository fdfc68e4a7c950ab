"""Constraints that are checked in two places with one text: here by pydantic, and by the apiserver as CEL.

A constraint that only pydantic knew would let ``kubectl`` accept what ``tq up`` refuses, and the other way round.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from transfer_queue.config.document import Document

__all__ = ["NO_LIMIT", "Between", "Matches", "Model", "Rule"]

NO_LIMIT = 2**63 - 1
CEL_RULES = "x-kubernetes-validations"


@dataclass(frozen=True)
class Between:
    """An integer from ``low`` to ``high``, both included."""

    low: int
    high: int

    @property
    def hint(self) -> str:
        allowed = f"a whole number from {self.low} to {self.high}"
        if self.high == NO_LIMIT:
            allowed = f"a whole number from {self.low} on"
        return f"is out of range; use {self.low if self.low == self.high else allowed}"

    def check(self, value: int) -> int:
        if not self.low <= value <= self.high:
            raise PydanticCustomError("out_of_range", "{problem}", {"problem": f"{value} {self.hint}"})
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        rule = {
            "rule": f"self >= {self.low} && self <= {self.high}",
            "message": self.hint,  # without the number: the apiserver cannot bound the cost of making it a string
        }
        return {**handler(schema), "format": "int64", CEL_RULES: [rule]}


@dataclass(frozen=True)
class Matches:
    """A string of at most ``longest`` characters that matches ``pattern``; ``what`` names it: ``an interface name``."""

    pattern: str
    what: str
    longest: int

    @property
    def hint(self) -> str:
        return f"is not {self.what}"

    def check(self, value: str) -> str:
        if len(value) > self.longest:
            raise PydanticCustomError(
                "too_long", "{problem}", {"problem": f"Too long: may not be more than {self.longest} bytes"}
            )
        if re.fullmatch(self.pattern, value) is None:
            shown = json.dumps(value, ensure_ascii=False)
            raise PydanticCustomError("no_match", "{problem}", {"problem": f"{shown} {self.hint}"})
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        written = self.pattern.replace("\\", "\\\\")  # in a text of CEL
        rule = {"rule": f"self.matches('{written}')", "messageExpression": f"'\"' + self + '\" {self.hint}'"}
        return {**handler(schema), "maxLength": self.longest, CEL_RULES: [rule]}


@dataclass(frozen=True)
class Rule:
    """A condition over several fields of one object: ``check`` for Python, ``cel`` for the apiserver."""

    check: Callable[[Any], bool]
    cel: str
    message: str


class Model(Document):
    r"""A document that the apiserver checks, too: types are strict, ``null`` means absent, and `Rule`\ s apply."""

    model_config = ConfigDict(populate_by_name=False, strict=True)
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, Mapping):  # as the apiserver does for fields that are not nullable, if it knows them
            known = _names(cls)
            return {name: value for name, value in data.items() if value is not None or name not in known}
        return data

    @model_validator(mode="after")
    def _keep_rules(self) -> Model:
        for rule in self.rules:
            if not rule.check(self):
                raise PydanticCustomError("rule", "{problem}", {"problem": rule.message})
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler.resolve_ref_schema(handler(schema))
        if cls.rules:
            found[CEL_RULES] = [{"rule": rule.cel, "message": rule.message} for rule in cls.rules]
        return found


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Names of the fields in YAML and in Python."""
    return frozenset({*model.model_fields, *(field.alias or name for name, field in model.model_fields.items())})
