"""Translate a BackendConfig, quantc's or torch's, to a rule table.

Every pattern with at least one format becomes a rule. Batch norms behind layers are folded by then, and left out of the
patterns. Classes that torch swaps in for fused and trained layers have no op of their own in a program: the pattern of the
ops they are made of counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from quantc.annotate.quantizer import Backend
from quantc.backends import masks, rules
from quantc.errors import PatternError
from quantc.flows.fx.assign_qconfigs import is_layer
from quantc.flows.fx.backend_config import ObservationType
from quantc.flows.fx.custom_config import CustomConfigError, QuantType
from quantc.flows.fx.formats import check_dtypes, kinds_of
from quantc.flows.fx.native_rules import NATIVE, PER_AXIS_1, FlowBackend, norms, pools
from quantc.flows.fx.object_types import class_name, is_module_class, ops_of
from quantc.ir.dialect import BY_NAME, RANGES, op_name
from quantc.ir.sites import Origin
from quantc.patterns import aten
from quantc.patterns.dsl import OpPattern, Pattern, op
from quantc.patterns.operand_patterns import Leaf, const, leaf
from quantc.patterns.rule import Match
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.formats import Offer

SWAPPED_IN = ("torch.ao.nn.", "torch.nn.intrinsic.", "torch.nn.qat.", "torch.nn.quantized.", "torchao.")
"""Packages of the classes that stand for fused, trained and quantized layers."""
OP_OF_CLASS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((f"BatchNorm{n}d" for n in (1, 2, 3)), ("batch_norm",)),
    **dict.fromkeys((f"InstanceNorm{n}d" for n in (1, 2, 3)), norms.ops),
    **dict.fromkeys((f"AvgPool{n}d" for n in (1, 2, 3)), pools.ops),
    **dict.fromkeys((f"AdaptiveAvgPool{n}d" for n in (1, 2, 3)), pools.ops),
    **dict.fromkeys((f"MaxPool{n}d" for n in (1, 2, 3)), rules.max_pool.ops),
    **dict.fromkeys(("ReLU6", "Hardtanh"), ("clamp",)),
    **dict.fromkeys(("Upsample", "UpsamplingNearest2d", "UpsamplingBilinear2d"), ops_of("interpolate")),
    "RNNCell": aten.rnn_cell.ops,
}
"""The ops of layers that do not have the name of their op."""
PLAIN = {name.replace("_", ""): name for name in BY_NAME}
BINARY = (*aten.add.ops, *aten.sub.ops, *aten.mul.ops, *aten.div.ops, *aten.maximum.ops, *aten.minimum.ops, "matmul")
NUMBERED = (*aten.add.ops, *aten.mul.ops)
"""Ops that may have a number for their second operand."""
SHARES = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT.name
UNOBSERVED = ObservationType.INPUT_OUTPUT_NOT_OBSERVED.name


def backend_of(given: Any) -> Backend:
    """The backend a user means: none, one of quantc's, a BackendConfig of quantc's or torch's."""
    if given is None:
        return NATIVE
    if isinstance(given, Backend):
        return given
    if isinstance(getattr(given, "configs", None), list) and isinstance(getattr(given, "name", None), str):
        return translate_backend_config(given)
    raise CustomConfigError(
        f"backend_config is a {type(given).__name__}",
        advice="give a BackendConfig, a Backend of quantc's such as quantc.backends.x86.X86, or leave it out",
    )


def translate_backend_config(config: Any) -> FlowBackend:
    """The rule table of a BackendConfig."""
    formats: dict[str, tuple[Any, ...]] = {}
    rules: list[Rule] = []
    spelled: dict[str, Spelled] = {}
    names = Counter[str]()
    fused = {each.pattern: each.dtype_configs for each in config.configs if is_module_class(each.pattern)}
    for each in config.configs:
        check_fuser(each)
        dtypes = tuple(each.dtype_configs or fused.get(each.fused_module, ()))
        check_dtypes(each, dtypes)
        for rule, elements in _rules(each, dtypes, names) if dtypes else ():
            rules.append(rule)
            formats[rule.name] = dtypes
            spelled[rule.name] = Spelled(tuple(elements))
    name = config.name or "backend-config"
    return FlowBackend(
        name,
        RuleTable(name, tuple(rules)),
        roles=NATIVE.roles,
        takes=NATIVE.takes,
        summary="The patterns of a BackendConfig.",
        kinds={name: kinds_of(dtypes) for name, dtypes in formats.items()},
        known_ranges=frozenset(rule.name for rule in rules if rule.roles.get("out") in ("unit", "signed-unit")),
        formats=formats,
        spelled=spelled,
    )


def check_fuser(config: Any) -> None:
    """Refuse a fuser that is none of torch's: it may compute anything, and it would not be asked."""
    method, made = config.fuser_method, config.fused_module
    homes = [getattr(each, "__module__", "") or "" for each in (method, made)]
    if method is None or any(home.startswith(("torch.ao.", "torchao.")) for home in homes):
        return
    inside = getattr(method, "__closure__", None) or ()
    if any(str(getattr(cell.cell_contents, "__module__", "")).startswith("torch.ao.") for cell in inside):
        return  # one of torch's with its arguments turned around
    raise CustomConfigError(
        f"the fuser method {getattr(method, '__name__', method)} of a pattern is not run",
        where=f"the pattern {config.pattern or config._pattern_complex_format}",
        advice="leave it out: what a pattern computes stays as the model has it; set_fused_module, with a class of "
        "torch's, says that it puts the layers together and nothing else",
    )


# -- patterns ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spelled:
    """The condition that ops are called as a pattern has it: by a layer of a class, or by a function."""

    elements: tuple[Any, ...]

    def __call__(self, match: Match) -> str | None:
        for node in match.nodes:
            origin = match.program.origins.get(node) or Origin()
            if not any(_is_spelled(element, node, origin) for element in self.elements):
                called = origin.module_type.rpartition(".")[2] if is_layer(origin) else f"the function {op_name(node)}"
                return f"the backend config has no pattern for {called}, or not for what is around it"
        return None


def _is_spelled(element: Any, node: fx.Node, origin: Origin) -> bool:
    if is_module_class(element):
        return class_name(element) == origin.module_type
    return not is_layer(origin) and op_name(node) in ops_of(element)


@dataclass
class Written:
    """A pattern as it is being written: what it binds, and what it is called by."""

    roles: dict[str, str] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)

    def name(self, stem: str, role: str | None = None) -> str:
        """A new name for an operand."""
        found = stem
        while found in self.roles:
            found = f"{stem}{int(found.removeprefix(stem) or 0) + 1}"
        self.roles[found] = role or ""
        return found

    def chain(self, pattern: Any) -> Pattern:
        """A pattern in the order of the calls."""
        if not isinstance(pattern, tuple):
            return self.call(pattern)
        kept = [each for each in pattern if not _is_folded(each)] if not _is_folded(pattern[0]) else pattern
        first, *rest = kept
        found: Pattern = self.chain(first)
        for each in rest:
            found = found >> self.call(each, is_first=False)
        return found

    def nested(self, pattern: Any) -> Pattern | Leaf:
        """A pattern from its result inwards."""
        if getattr(pattern, "__name__", "") == "MatchAllNode":
            return leaf("_")
        if not isinstance(pattern, tuple):
            return self.call(pattern)
        head, *operands = pattern
        if _is_folded(head) and len(operands) == 1:
            return self.nested(operands[0])
        ops = self._ops(head)
        self.elements.append(head)
        if not any(name in BINARY for name in ops):
            return op(*ops, args="_")(self.nested(operands[0]))
        found = [self.nested(each) for each in operands]
        rows = [each if isinstance(each, Pattern) else leaf(self.name("y", "act")) for each in found]
        return _plain(ops)(*rows)

    def call(self, element: Any, *, is_first: bool = True) -> OpPattern:
        """One op; its first operand is what the op before it yields, unless it is the first."""
        ops = self._ops(element)
        self.elements.append(element)
        x = leaf(self.name("x", "act")) if is_first else leaf("_")
        if any(name in BINARY for name in ops):
            return _plain(ops)(x, self.name("y", "act"))
        if "addmm" in ops:
            return aten.addmm("_", x, const(self.name("w", PER_AXIS_1), rank=2))
        if {*ops} & {*aten.conv.ops, "linear"}:
            return op(*ops)(x, const(self.name("w", "weight")), f"{self.name('b')}?")
        if {*ops} & {*aten.conv_transpose.ops}:
            return op(*ops)(x, const(self.name("w", PER_AXIS_1)), f"{self.name('b')}?")
        if ops in (("cat",), ("stack",)):
            self.roles = {self.name("xs"): "act"}
            return op(*ops, args="xs*")
        if ops == ("batch_norm",):
            return rules.batch_norm(x)
        if ops == ("dropout",):
            return aten.dropout.having(train=False)(x)
        if ops == ("prelu",):
            return op(*ops)(x, self.name("slope"))
        return op(*ops)(x)

    def _ops(self, element: Any) -> tuple[str, ...]:
        found = ops_of_element(element)
        if not found:
            raise Unknown(element)
        return found


def _plain(ops: tuple[str, ...]) -> OpPattern:
    """A binary op; a sum is one of its operands as they are, none of them times a number."""
    return op(*ops).having(alpha=1) if {*ops} <= {"add", "sub", "rsub"} else op(*ops)


class Unknown(Exception):  # noqa: N818 - it says what is not known, and is caught where patterns are read
    """A part of a pattern that stands for no op."""


def ops_of_element(element: Any) -> tuple[str, ...]:
    """The ops of a layer or function; none if it is none of torch's."""
    if not is_module_class(element):
        return ops_of(element) if callable(element) or isinstance(element, str) else ()
    if element.__module__.startswith(SWAPPED_IN) or not element.__module__.startswith("torch."):
        return ()
    plain = PLAIN.get(element.__name__.lower())
    return OP_OF_CLASS.get(element.__name__, () if plain is None else (plain,))


def _is_folded(element: Any) -> bool:
    return is_module_class(element) and ops_of_element(element) == ("batch_norm",)


def _rules(config: Any, dtypes: tuple[Any, ...], names: Counter[str]) -> Iterable[tuple[Rule, list[Any]]]:
    """The rules of one pattern, and what it is called by: none if it is of classes that programs do not have."""
    pattern, is_nested = config.pattern, config._pattern_complex_format is not None
    given = config._pattern_complex_format if is_nested else pattern
    if config.observation_type.name == UNOBSERVED or _is_swapped_in(given):
        return
    whole = [rule for rule in (*rules.RECURRENT, *rules.LOOKUPS) if {*rule.compiled.names} and _roots(rule, given)]
    written = Written()
    try:
        made = written.nested(given) if is_nested else written.chain(given)
    except Unknown as unknown:
        if _is_torchs(unknown.args[0]):
            return  # which no program has, or which is no op
        raise _not_an_op(unknown.args[0], given) from None
    except PatternError as error:
        raise CustomConfigError(f"a pattern cannot be matched: {error.what}", where=repr(given)) from error
    if not isinstance(made, Pattern):
        return
    for rule in whole:
        yield _rule(rule.pattern, dict(rule.roles), written, dtypes, names), written.elements
    if whole:
        return
    roles = {name: role for name, role in written.roles.items() if role}
    roles["out"] = _output(config, written, roles, dtypes)
    yield _rule(made, roles, written, dtypes, names), written.elements
    if isinstance(made, OpPattern) and not is_nested and {*made.ops} & {*NUMBERED}:
        alone = rules.with_number(aten.add if "add" in made.ops else aten.mul)
        yield _rule(alone, {"x": "act", "out": "act"}, written, dtypes, names), written.elements


def _rule(
    pattern: Pattern, roles: dict[str, str], written: Written, dtypes: tuple[Any, ...], names: Counter[str]
) -> Rule:
    stem = "-".join(name for element in written.elements for name in ops_of_element(element)[:1])
    stem = stem.replace(".", "_").lower()
    names[stem] += 1
    name = stem if names[stem] == 1 else f"{stem}-{names[stem]}"
    dynamic = Offer.YES if QuantType.DYNAMIC in kinds_of(dtypes) else Offer.NO
    return Rule(name, pattern, roles, when=(masks.NO_MASK,), supports={"qdq", "integer"}, dynamic=dynamic)


def _output(config: Any, written: Written, roles: Mapping[str, str], dtypes: tuple[Any, ...]) -> str:
    """The role of a pattern's result."""
    first = next(iter(roles))
    if config.observation_type.name == SHARES:
        return f"like {first}"
    ops = ops_of_element(written.elements[-1])
    exact = any(getattr(each.output_dtype_with_constraints, "scale_exact_match", None) is not None for each in dtypes)
    if len(written.elements) == 1 and exact and ops:
        return rules.RANGE_ROLES[RANGES[ops[0]]] if ops[0] in RANGES else "act"
    return "act"


def _roots(rule: Rule, given: Any) -> bool:
    targets = {str(name) for name in getattr(rule.pattern, "ops", ())}
    return bool(targets & {*ops_of_element(given)}) if not isinstance(given, tuple) else False


def _flat(pattern: Any) -> Iterable[Any]:
    for each in pattern if isinstance(pattern, tuple) else (pattern,):
        yield from _flat(each) if isinstance(each, tuple) else (each,)


def _is_swapped_in(pattern: Any) -> bool:
    return any(is_module_class(each) and each.__module__.startswith(SWAPPED_IN) for each in _flat(pattern))


def _is_torchs(element: Any) -> bool:
    home = getattr(element, "__module__", None) or ""
    is_function = callable(element) and not isinstance(element, type)
    return (
        isinstance(element, str)
        or home.startswith(("torch", "_operator", "builtins"))
        or (is_function and (not home or element in vars(torch.Tensor).values()))
    )


def _not_an_op(element: Any, pattern: Any) -> CustomConfigError:
    return CustomConfigError(
        f"{getattr(element, '__name__', element)} is no layer or function of torch's, so a pattern of it matches nothing",
        where=f"the pattern {pattern!r}",
        advice="write the pattern of the ops that it is made of, or keep the module whole: float_to_observed_mapping",
    )
