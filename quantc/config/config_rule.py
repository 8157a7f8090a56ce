"""One rule of a config: what it is for, and what happens there."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from quantc.config.selectors import Selector
from quantc.errors import ConfigError, suggest
from quantc.ir.decisions import FLOAT, OUTCOMES, Fixed, Float, Quantize
from quantc.spec.formats import Role, Timing
from quantc.spec.spec import NAMED, QuantSpec, name_of
from quantc.support.validated import Frozen

Use = Quantize | Fixed | Float
"""The settings a rule may request."""


def _use(value: Any) -> Any:
    """A spec, its text, the name of one, FLOAT, or an outcome as data."""
    if isinstance(value, QuantSpec):
        return Quantize(value)
    if isinstance(value, str):
        return _use_from_text(value)
    return OUTCOMES.validate_python(value) if isinstance(value, dict) else value


def _use_from_text(text: str) -> Use:
    if text == "FLOAT":
        return FLOAT
    if text.isidentifier() and text.isupper() and text not in NAMED:
        raise ConfigError(f"unknown spec {text}", advice=suggest(text, ["FLOAT", *NAMED], noun="named specs"))
    return Quantize(QuantSpec.parse(text))


def _use_as_data(value: Use) -> Any:
    if value == FLOAT:
        return "FLOAT"
    return name_of(value.spec) if isinstance(value, Quantize) else OUTCOMES.dump_python(value, mode="json")


USE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "description": f"FLOAT, a named spec ({', '.join(NAMED)}), or the text of one"},
        {"type": "object", "required": ["kind"], "description": "an outcome: quantize, fixed or float"},
    ]
}


class ConfigRule(Frozen, frozen=True):
    """One rule: a selector and a setting."""

    noun: ClassVar[str] = "rule"
    fault = ConfigError

    select: Selector
    use: Annotated[Use, BeforeValidator(_use), PlainSerializer(_use_as_data), WithJsonSchema(USE_SCHEMA)]
    role: Role | None = None
    """Only for weights, activations or biases; without it the spec's own role, and FLOAT is for all."""

    def why_not(self) -> str | None:
        if isinstance(self.use, Float) or self.role is None or self.role is self.use.spec.role:
            return None
        return (
            f"role: {name_of(self.use.spec)} is meant for {self.use.spec.role.value}, not for {self.role.value}; "
            f"write spec.but(role={self.role.value!r})"
        )

    @property
    def settings(self) -> dict[Role, Use]:
        """The setting for each role."""
        if isinstance(self.use, Float):
            return dict.fromkeys([self.role] if self.role is not None else Role, self.use)
        if self.use.spec.timing is Timing.WEIGHT_ONLY:
            rest = Float("weight only")
            return {Role.WEIGHT: self.use, Role.ACT: rest, Role.BIAS: rest}
        return {self.use.spec.role: self.use}

    @property
    def timing(self) -> Timing:
        """The technique it belongs to; static for FLOAT."""
        return Timing.STATIC if isinstance(self.use, Float) else self.use.spec.timing

    @property
    def is_weight_only(self) -> bool:
        return self.timing is Timing.WEIGHT_ONLY

    def __str__(self) -> str:
        only = f" ({self.role.value} only)" if self.role is not None else ""
        return f"{self.select}{only}: {self.use}"
