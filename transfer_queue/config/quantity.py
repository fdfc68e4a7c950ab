"""Kubernetes quantities of bytes: ``64Gi``, ``500Mi``, ``1G`` or a plain number."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PlainValidator, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

__all__ = ["QUANTITY_HINT", "QUANTITY_PATTERN", "Amount", "AtLeast", "Quantity", "amount"]

_FACTORS: Final = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{f"{suffix}i": Decimal(1024) ** (power + 1) for power, suffix in enumerate("KMGTPE")},
    **{suffix: Decimal(1000) ** (power + 1) for power, suffix in enumerate("kMGTPE")},
}
# One expression that also refuses zero, and more digits than any number of bytes has: the apiserver charges every
# expression by its worst case.
QUANTITY_PATTERN: Final = r"^(0*[1-9][0-9]{0,18}([.][0-9]+)?|0+[.]0*[1-9][0-9]*)([KMGTP]i|[kMGTP])?$"
_AMOUNT_PATTERN: Final = r"^[0-9]+([.][0-9]+)?(m|[KMGTPE]i|[kMGTPE])?$"
QUANTITY_HINT: Final = (
    "is not a quantity above zero; use a number with Ki, Mi, Gi, Ti, Pi, k, M, G, T or P, such as 64Gi"
)


class Quantity(int):
    """A number of bytes above zero that remembers how it was written: ``Quantity("64Gi") == 64 * 2**30``.

    Raises ``ValueError`` with a text that says what is allowed.
    """

    text: str

    def __new__(cls, value: str | int) -> Quantity:
        text = str(value)
        found = None if isinstance(value, bool) else re.fullmatch(QUANTITY_PATTERN, text)
        if found is None:
            raise ValueError(f"{json.dumps(text, ensure_ascii=False)} {QUANTITY_HINT}")
        number = super().__new__(cls, Decimal(found[1]) * _FACTORS[found[3] or ""])
        number.text = text
        return number

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Quantity({self.text!r})"

    def __reduce__(self) -> tuple[type[Quantity], tuple[str]]:
        return Quantity, (self.text,)

    @classmethod
    def _validate(cls, value: Any) -> Quantity:
        if not _is_amount(value):
            raise PydanticCustomError(
                "quantity", "{problem}", {"problem": f"{json.dumps(value, default=str)} {QUANTITY_HINT}"}
            )
        try:
            return cls(str(value))
        except ValueError as error:
            raise PydanticCustomError("quantity", "{problem}", {"problem": str(error)}) from None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate, serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.text)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # The apiserver evaluates the rule and shows the message, so both faces speak with one voice.
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": f"type(self) == int ? self > 0 : self.matches('{QUANTITY_PATTERN}')",
                    "messageExpression": f"'\"' + string(self) + '\" {QUANTITY_HINT}'",
                }
            ],
        }


@dataclass(frozen=True)
class AtLeast:
    """A :class:`Quantity` of ``smallest`` or more; ``use`` says what it is too small for."""

    smallest: str
    use: str

    @property
    def hint(self) -> str:
        return f"is too small for {self.use}; use at least {self.smallest}"

    def check(self, value: Quantity) -> Quantity:
        if value < Quantity(self.smallest):
            raise PydanticCustomError("too_small", "{problem}", {"problem": f'"{value}" {self.hint}'})
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(schema)
        least = int(Quantity(self.smallest))
        # What is no quantity is refused by the other rule alone.
        rule = {
            "rule": f"type(self) == int ? self >= {least} || self <= 0 : "
            f"!self.matches('{QUANTITY_PATTERN}') || quantity(self).compareTo(quantity('{self.smallest}')) >= 0",
            "messageExpression": f"'\"' + string(self) + '\" {self.hint}'",
        }
        return {**found, "x-kubernetes-validations": [*found["x-kubernetes-validations"], rule]}


def amount(text: str) -> Decimal | str:
    """A quantity of Kubernetes, such as ``500m``, ``2Gi`` or ``1k``, as a number; other text as it is."""
    number = text.rstrip("mkKMGTPEi")
    try:
        return Decimal(number) * _FACTORS[text[len(number) :]]
    except (ArithmeticError, KeyError):
        return text


def _is_amount(value: Any) -> bool:
    """Whether it is a text or an integer that the apiserver can hold."""
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def _amount(value: Any) -> str:
    if not _is_amount(value):
        raise PydanticCustomError("string_type", "must be of type string")
    if isinstance(value, int) and value < 0:
        raise PydanticCustomError("too_small", "{problem}", {"problem": "should be greater than or equal to 0"})
    if re.fullmatch(_AMOUNT_PATTERN, str(value)) is None:
        raise PydanticCustomError("string_pattern_mismatch", "should match", {"pattern": _AMOUNT_PATTERN})
    return str(value)


Amount = Annotated[
    str,
    PlainValidator(_amount),
    # A pattern, not a rule: these sit in maps without a bound, whose rules the apiserver would find too costly.
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": _AMOUNT_PATTERN,
            "minimum": 0,
        }
    ),
]
"""Any resource amount, ``500m`` of a CPU included, kept as text."""
