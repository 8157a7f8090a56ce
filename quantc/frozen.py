"""Frozen values whose faults are quantc's errors: each names the field and what is allowed there."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from quantc.errors import QuantcError, SpecError

MOST_SHOWN = 60


def faults_of(error: ValidationError) -> list[str]:
    """One line a fault: the field, what is wrong, and what was given."""
    lines = []
    for fault in error.errors(include_url=False):
        given = repr(fault["input"])
        given = given if len(given) <= MOST_SHOWN else f"{given[:MOST_SHOWN]}…"
        field = ".".join(str(part) for part in fault["loc"])
        told = fault["msg"].removeprefix("Value error, ")
        lines.append(f"{field}: {told} (given: {given})" if field else told)
    return lines


class Frozen(BaseModel):
    """A value: immutable, comparable, hashable, and checked whenever one is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    noun: ClassVar[str] = "value"
    fault: ClassVar[type[QuantcError]] = SpecError

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_faults(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise cls.fault(
                f"this is no valid {cls.noun}: {'; '.join(faults_of(error))}",
                advice=f"the fields of a {cls.noun} are {', '.join(cls.model_fields)}",
            ) from error
