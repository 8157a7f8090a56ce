"""Validated frozen values: validation failures are quantc errors that name the field and its allowed values."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError, model_validator

from quantc.errors import QuantcError, SpecError

MAX_SHOWN = 60


def faults_of(error: ValidationError) -> list[str]:
    """One line for each validation error: the field, the fault, and the value given."""
    lines = []
    for fault in error.errors(include_url=False):
        if fault["type"] == "default_factory_not_called":
            continue  # a default derived from a field that is invalid itself
        given = repr(fault["input"])
        given = given if len(given) <= MAX_SHOWN else f"{given[:MAX_SHOWN]}…"
        field = ".".join(str(part) for part in fault["loc"])
        told = fault["msg"].removeprefix("Value error, ")
        lines.append(f"{field}: {told} (given: {given})" if field else told)
    return lines


class Frozen(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Base of validated values: immutable, comparable, hashable, checked on construction."""

    noun: ClassVar[str] = "value"
    fault: ClassVar[type[QuantcError]] = SpecError

    def why_not(self) -> str | None:
        """The fault in a combination of fields that are valid one by one; None if there is none."""
        return None

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_faults(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, cls):
            return data
        try:
            value = handler(data)
        except ValidationError as error:
            raise cls._fault(faults_of(error)) from error
        if (reason := value.why_not()) is not None:
            raise cls._fault([reason])
        return value

    @classmethod
    def _fault(cls, faults: list[str]) -> QuantcError:
        return cls.fault(
            f"invalid {cls.noun}: {'; '.join(faults)}",
            advice=f"the fields of a {cls.noun} are: {', '.join(cls.model_fields) or 'none'}",
        )
