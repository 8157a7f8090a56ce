"""Changes that would let a rule claim a node, as data. Those that can be automated have an `apply`.

A change applies to the user's config, to the program (captured or prepared; the result has to be prepared again), or to
the backend. The rest are changes to the model, to be made by its author: `by hand`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from quantc.annotate.quantizer import Backend
from quantc.config.config import QuantConfig
from quantc.config.config_rule import ConfigRule
from quantc.config.selectors import ByOp
from quantc.errors import QuantcError
from quantc.inspect import surgery
from quantc.ir.decisions import Float
from quantc.ir.program import Program
from quantc.patterns.dsl import op
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.formats import Timing
from quantc.spec.spec import name_of

S = TypeVar("S")


@dataclass(frozen=True)
class Change(Generic[S]):
    """A change to something of type `S`."""

    kind: ClassVar[str]
    cost: ClassVar[int]
    """Rank by the amount of change; the smallest has the lowest."""
    on: ClassVar[str]
    """The object to apply it to: "config", "program", "backend", or "model" for a change to make by hand."""

    @abstractmethod
    def apply(self, subject: S) -> S:
        """The changed copy. The subject is not modified."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Fields specific to the change, as data."""

    def to_data(self) -> dict[str, Any]:
        return {"kind": self.kind, "on": self.on, **self.fields()}


@dataclass(frozen=True)
class RemoveConfigRule(Change[QuantConfig]):
    """Remove the config rules that leave a node float."""

    kind = "remove-config-rule"
    cost = 0
    on = "config"
    node: str
    rules: tuple[ConfigRule, ...]

    def apply(self, subject: QuantConfig) -> QuantConfig:
        missing = [rule for rule in self.rules if rule not in subject.rules]
        if missing:
            raise QuantcError(
                f"the config has no rule {missing[0]}",
                where=f"change {self}",
                advice="apply it to the config the program was prepared with",
            )
        return QuantConfig(rules=tuple(rule for rule in subject.rules if rule not in self.rules))

    def fields(self) -> dict[str, Any]:
        return {"node": self.node, "rules": [rule.model_dump(mode="json") for rule in self.rules]}

    def __str__(self) -> str:
        return f"remove from the config: {'; '.join(map(str, self.rules))}"


@dataclass(frozen=True)
class AddConfigRule(Change[QuantConfig]):
    """Add a config rule for a node; the last rule that matches wins."""

    kind = "add-config-rule"
    cost = 1
    on = "config"
    node: str
    rule: ConfigRule

    def apply(self, subject: QuantConfig) -> QuantConfig:
        return QuantConfig(rules=(*subject.rules, self.rule))

    def fields(self) -> dict[str, Any]:
        return {"node": self.node, "rule": self.rule.model_dump(mode="json")}

    def __str__(self) -> str:
        """The call that adds it, and what else there is to do then."""
        select, use = self.rule.select, self.rule.use
        call = f'set_op("{select.op}"' if isinstance(select, ByOp) else f'set_node("{getattr(select, "node", select)}"'
        text = "FLOAT" if isinstance(use, Float) else name_of(use.spec)
        shown = text if text.isidentifier() and text.isupper() else f'"{text}"'
        is_static = not isinstance(use, Float) and use.spec.timing is Timing.STATIC
        more = ", and calibrate: static scales come from data" if is_static else ""
        return f"config.{call}, {shown}){more}"


@dataclass(frozen=True)
class SetArgument(Change[Program]):
    """Change arguments of a node."""

    kind = "set-argument"
    cost = 1
    on = "program"
    node: str
    arguments: tuple[tuple[str, Any], ...]

    def apply(self, subject: Program) -> Program:
        return surgery.set_arguments(subject, self.node, dict(self.arguments))

    def fields(self) -> dict[str, Any]:
        return {"node": self.node, "arguments": dict(self.arguments)}

    def __str__(self) -> str:
        return f"call {self.node} with {', '.join(f'{name}={value!r}' for name, value in self.arguments)}"


@dataclass(frozen=True)
class SingleUser(Change[Program]):
    """Compute a node twice, so that users outside the match have their own copy."""

    kind = "single-user"
    cost = 2
    on = "program"
    node: str
    other: str
    keep: tuple[str, ...]
    """The users that are part of the match."""

    def apply(self, subject: Program) -> Program:
        return surgery.give_others_a_copy(subject, self.node, self.keep)

    def fields(self) -> dict[str, Any]:
        return {"node": self.node, "other": self.other, "keep": list(self.keep)}

    def __str__(self) -> str:
        return f"compute {self.node} a second time for {self.other}, so that it has one user"


@dataclass(frozen=True)
class Cast(Change[Program]):
    """Compute nodes in float32: cast their inputs, and cast their results back."""

    kind = "cast"
    cost = 2
    on = "program"
    nodes: tuple[str, ...]
    dtype: str

    def apply(self, subject: Program) -> Program:
        return surgery.compute_in(subject, self.nodes, self.dtype)

    def fields(self) -> dict[str, Any]:
        return {"nodes": list(self.nodes), "dtype": self.dtype}

    def __str__(self) -> str:
        return f"compute {', '.join(self.nodes)} in {self.dtype}"


@dataclass(frozen=True)
class MakeConstant(Change[Program]):
    """Store a computed or given tensor as a constant of the program."""

    kind = "make-constant"
    cost = 3
    on = "program"
    node: str
    operand: str

    def apply(self, subject: Program, value: Tensor | None = None) -> Program:
        """`value` may be omitted if the tensor is computed from constants alone."""
        return surgery.make_constant(subject, self.node, self.operand, value)

    def fields(self) -> dict[str, Any]:
        return {"node": self.node, "operand": self.operand}

    def __str__(self) -> str:
        return f"make {self.operand}, which {self.node} reads, a constant: a parameter or a buffer"


@dataclass(frozen=True)
class RemoveRule(Change[Backend]):
    """Remove a backend rule that claims nodes another rule needs."""

    kind = "remove-rule"
    cost = 4
    on = "backend"
    node: str
    rule: str

    def apply(self, subject: Backend) -> Backend:
        return replace(subject, table=subject.table.without(self.rule))

    def fields(self) -> dict[str, Any]:
        return {"node": self.node, "rule": self.rule}

    def __str__(self) -> str:
        return f"take the rule {self.rule} out of the backend's table: it has {self.node}"


@dataclass(frozen=True)
class AddRule(Change[Backend]):
    """Add a backend rule for a single op."""

    kind = "add-rule"
    cost = 5
    on = "backend"
    op: str
    rule: str
    args: str
    """The operands of the op, as `quantc.patterns.op` takes them."""
    roles: tuple[tuple[str, str], ...]

    def apply(self, subject: Backend) -> Backend:
        rule = Rule(self.rule, op(self.op, args=self.args), dict(self.roles), supports={"qdq"})
        return replace(
            subject, table=RuleTable(subject.table.name, (rule, *subject.table))
        )  # of rules of one size the first wins

    def fields(self) -> dict[str, Any]:
        return {"op": self.op, "rule": self.rule, "args": self.args, "roles": dict(self.roles)}

    def __str__(self) -> str:
        return f"add to the backend: Rule({self.rule!r}, op({self.op!r}, args={self.args!r}), {dict(self.roles)})"


@dataclass(frozen=True)
class Through(Change[Any]):
    """Quantize another node that this one depends on; `change` says how."""

    kind: ClassVar[str] = "quantize-other"
    cost: ClassVar[int] = 1
    node: str
    change: Change[Any]

    @property
    def on(self) -> str:  # type: ignore[override]
        return self.change.on

    def apply(self, subject: Any) -> Any:
        return self.change.apply(subject)

    def fields(self) -> dict[str, Any]:
        return {"node": self.node, "change": self.change.to_data()}

    def __str__(self) -> str:
        return f"let {self.node} be quantized: {self.change}"


@dataclass(frozen=True)
class QuantizeInput(Through):
    """Quantize the input of a node."""

    kind = "quantize-input"


@dataclass(frozen=True)
class QuantizeReader(Through):
    """Quantize the user of a node."""

    kind = "quantize-reader"


@dataclass(frozen=True)
class ByHand(Change[Any]):
    """A change to the model that only its author can make. `what` is its kind in data."""

    kind = "by-hand"
    cost = 7
    on = "model"
    what: str
    node: str
    text: str

    def apply(self, subject: Any) -> Any:
        raise QuantcError(
            f"this change is to be made by hand: {self.text}",
            where=self.node,
            advice="change the model and capture it again",
        )

    def to_data(self) -> dict[str, Any]:
        return {"kind": self.what, "on": self.on, **self.fields()}

    def fields(self) -> dict[str, Any]:
        return {"node": self.node, "text": self.text}

    def __str__(self) -> str:
        return self.text


def total_cost(change: Change[Any]) -> int:
    """Cost of a change, nested changes included."""
    cost = change.cost
    while isinstance(change, Through):
        change = change.change
        cost += change.cost
    return cost
