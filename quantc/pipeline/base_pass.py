"""The base class of passes. A pass is a frozen value whose fields are its options."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from inspect import cleandoc, isabstract
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict
from torch import fx

from quantc.errors import PipelineError
from quantc.ir.judgment import Judgment
from quantc.ir.program import Program, Stage
from quantc.support.option_text import spell

KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class Preserves(Enum):
    """The promise of a pass about the program's numbers. `quantc.hooks.Guard` checks it."""

    EXACTLY = "every output keeps its bits"
    CLOSELY = "outputs may differ by rounding, as when a multiplication is folded into a weight"
    STEPWISE = "every op yields what it did on the same inputs, within one step of 8 bits, or rounding"
    NOTHING = "outputs change, as when tensors are quantized"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a pass: whether it changed the program, and its notes for the log."""

    changed: bool
    notes: tuple[str, ...] = ()
    judgments: tuple[Judgment, ...] = ()
    """The fate of each site, where a pass decides by numbers."""

    def __bool__(self) -> bool:
        return self.changed


class Pass(BaseModel, ABC):
    """One step of a pipeline: a frozen value whose fields are its options.

    Its docstring is its page in docs/passes.md. Running it twice must change nothing the second time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: ClassVar[str]
    """The name in pipeline text, in kebab-case and starting with a verb: `fold-constants`."""
    needs: ClassVar[Stage] = Stage.CANONICAL
    """The stage a program must have reached."""
    gives: ClassVar[Stage | None] = None
    """The stage it has reached afterwards."""
    before: ClassVar[Stage | None] = None
    """The stage it must not have reached yet."""
    preserves: ClassVar[Preserves] = Preserves.EXACTLY
    """The promise about the numbers."""

    @abstractmethod
    def run(self, program: Program) -> bool | Outcome:
        """Transform `program` in place; return truthfully whether anything changed (Outcome: also adds notes to the
        log)."""

    def for_config(self, config: Any) -> Pass:
        """The pass configured by a `QuantConfig`, where it is a backend's transform."""
        return self

    def left_whole(self, program: Program) -> dict[fx.Node, str]:
        """The nodes that it targets and will leave unchanged, each with the reason."""
        return {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if isabstract(cls):
            return
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not KEBAB.fullmatch(name):
            raise PipelineError(
                f"the pass {cls.__qualname__} is named {name!r}",
                where=cls.__module__,
                advice='give the class a kebab-case name: name: ClassVar[str] = "fold-constants"',
            )
        if cls.before is not None and cls.before <= cls.needs:
            raise PipelineError(
                f"the pass {name} can never run: it needs {cls.needs.label} and must run before {cls.before.label}",
                where=cls.__module__,
                advice="correct its `needs` or its `before`",
            )

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The option names as spelled in pipeline text."""
        return tuple(field.replace("_", "-") for field in cls.model_fields)

    @classmethod
    def summary(cls) -> str:
        """The first line of its docstring."""
        return cleandoc(cls.__doc__ or "").partition("\n")[0]

    def __str__(self) -> str:
        """The text form; options with their default value are omitted."""
        fields = type(self).model_fields
        given = [
            name
            for name, field in fields.items()
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]
        if not given:
            return self.name
        values = self.model_dump(mode="json", include=set(given))
        texts = []
        for name in given:
            value = values[name]
            if isinstance(getattr(self, name), set | frozenset):
                value = sorted(value, key=spell)
            texts.append(f"{name.replace('_', '-')}={spell(value)}")
        return f"{self.name}{{{' '.join(texts)}}}"
