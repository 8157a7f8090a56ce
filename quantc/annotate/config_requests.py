"""What a config asks of a backend's rules: whether it is granted, in which form, or why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from quantc.annotate.backend import Backend
from quantc.config.resolve import Setting
from quantc.config.selectors import ByEdge, ByNode, ByOp
from quantc.errors import AnnotationError
from quantc.ir.decisions import Fixed, Float, Quantize
from quantc.ir.dialect import op_name, operands
from quantc.ir.program import Program
from quantc.ir.types import tensor_type
from quantc.spec.formats import Offer, PerChannel, PerGroup, PerTensor, PerToken, Timing
from quantc.spec.spec import QuantSpec, name_of

if TYPE_CHECKING:
    from quantc.patterns.table import Rule

BY_NAME = (ByOp, ByNode, ByEdge)
"""Selectors that mean an op itself, where others mean all that is in a module."""
ACROSS_ROWS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((f"conv{n}d" for n in (1, 2, 3)), ("x",)),
    **dict.fromkeys((f"conv_transpose{n}d" for n in (1, 2, 3)), ("x",)),
    **dict.fromkeys(("matmul", "addmm", "baddbmm"), ("y",)),
}
"""The operands whose rows along the last axis go into one sum, by op: rows with scales of their own could not be
added up as integers."""
GROUP_SIZES = (256, 128, 64, 32, 16, 8, 4, 2)
MAX_PLACES = 20
"""How many places an error names."""


def timing_of(setting: Setting | None) -> Timing:
    """The technique that a setting is part of; static where it says nothing of that."""
    return Timing.STATIC if setting is None else setting.rule.timing


def is_dynamic(setting: Setting | None) -> bool:
    """Whether a setting asks for scales that are found as the program runs."""
    return setting is not None and not isinstance(setting.use, Float) and setting.use.spec.timing is Timing.DYNAMIC


def why_not_dynamic(rule: Rule, setting: Setting | None, node: fx.Node, value: fx.Node) -> str | None:
    """Why a rule cannot have run-time scales for what a node of it reads, where the config asks for them."""
    if setting is None or isinstance(setting.use, Float) or not is_dynamic(setting):
        return None
    if rule.dynamic is Offer.NO:
        return f"it has no dynamic form, which the config asks for: {setting.rule}"
    if rule.dynamic is Offer.NAMED and not _is_named(setting, node):
        return only_where_named(Timing.DYNAMIC)
    if isinstance(setting.use.spec.granularity, PerToken) and _adds_rows(node, value):
        return f"it adds up rows of {value.name}, which per-token gives different scales: {setting.rule}"
    return None


def why_not_static(rule: Rule, asked: Iterable[tuple[fx.Node, Setting | None]]) -> str | None:
    """Why a rule is not to have scales that are known beforehand; `asked` is what the config says of each tensor that the
    rule reads, by the node that reads it. One that is named will do for all."""
    if rule.static is Offer.YES:
        return None
    read = [(node, said) for node, said in asked if said is None or not isinstance(said.use, Float)]
    if not read or any(is_dynamic(said) for _, said in read):
        return None
    if rule.static is Offer.NAMED:
        is_named = any(said is not None and _is_named(said, node) for node, said in read)
        return None if is_named else only_where_named(Timing.STATIC)
    if rule.dynamic is Offer.NO:
        return "it has no static form"
    return "it has no static form; with INT8_TOKEN or INT8_DYNAMIC by config it finds its scales as it runs"


def only_where_named(timing: Timing) -> str:
    """What there is to say of a rule that a config has to name, and does not."""
    return f"it is {timing} only where the config names the op, the node or the layer: it costs more than it gains"


def _is_named(setting: Setting, node: fx.Node) -> bool:
    """Whether a rule of the config means an op itself, by its name or by that of the layer whose weight it reads."""
    has_weight = any(value.op == "get_attr" for value in node.all_input_nodes)
    return isinstance(setting.rule.select, BY_NAME) or (setting.is_own and has_weight)


def _adds_rows(node: fx.Node, value: fx.Node) -> bool:
    across = ACROSS_ROWS.get(op_name(node), ())
    return any(name in across and given is value for name, given in operands(node))


@dataclass(frozen=True)
class Refused:
    """A spec that a backend cannot run at a place."""

    spec: QuantSpec
    reason: str
    place: str
    setting: Setting
    length: int | None = None
    """Of the axis that groups do not divide, where that is the reason."""

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class Request:
    """What a config asks for at one node; `value` is the tensor it is about, if it is an operand."""

    backend: Backend
    node: fx.Node
    value: fx.Node | None
    setting: Setting

    def granted(
        self, own: Quantize | Fixed, use: Quantize | Fixed, program: Program, refused: list[Refused]
    ) -> Quantize | Fixed:
        """What the config asks for, if the backend can run it; else the backend's own, and a word in `refused`.

        What follows from the op is the op's and not the config's: the axis of the channels, the axis that groups lie
        along, and a range known beforehand.
        """
        if use.spec.role is not own.spec.role:
            return own
        if isinstance(own, Fixed) and isinstance(use, Quantize) and _same_numbers(own, use):
            return own
        use = _fitted(own, use)
        reason, length = self.backend.why_not(use.spec), None
        share = use.spec.granularity
        if reason is None and isinstance(share, PerChannel) and _has_no_channels(own, use):
            reason = "the tensor has no axis of channels here, so granularity must be per-tensor"
        if reason is None and isinstance(share, PerGroup):
            reason, length = self._why_not_groups(share)
        if reason is not None:
            refused.append(Refused(use.spec, reason, program.describe(self.node), self.setting, length))
            return own
        return use

    def _why_not_groups(self, share: PerGroup) -> tuple[str | None, int | None]:
        kind = None if self.value is None else tensor_type(self.value)
        if kind is None or not share.axis < kind.rank:
            return "the shape of the weight is not known", None
        length = kind.shape[share.axis]
        if isinstance(length, int) and length % share.size == 0:
            return None, None
        counted = f"the {length} elements" if length != 1 else "the only element"
        why = f"groups of {share.size} do not divide {counted} of axis {share.axis} of {kind}"
        return why, length if isinstance(length, int) else None


def _fitted(own: Quantize | Fixed, use: Quantize | Fixed) -> Quantize | Fixed:
    """What is asked for, with the axes of the op."""
    theirs, ours = use.spec.granularity, own.spec.granularity
    if not isinstance(use, Quantize):
        return use
    if isinstance(theirs, PerChannel) and isinstance(ours, PerChannel):
        return Quantize(use.spec.but(granularity=ours))
    if isinstance(theirs, PerGroup) and not isinstance(ours, PerGroup):
        return Quantize(use.spec.but(granularity=PerGroup(axis=_summed_axis(ours), size=theirs.size)))
    return use


def _has_no_channels(own: Quantize | Fixed, use: Quantize | Fixed) -> bool:
    """Whether an op leaves no axis for scales: one that computes in float takes them along any."""
    return isinstance(own.spec.granularity, PerTensor) and use.spec.timing is not Timing.WEIGHT_ONLY


def _summed_axis(channels: PerChannel | PerTensor | object) -> int:
    """The axis of a weight that its op sums over, by the one its channels lie on: groups lie along it."""
    return 0 if isinstance(channels, PerTensor) or channels == PerChannel(axis=1) else 1


def _same_numbers(own: Fixed, use: Quantize) -> bool:
    """Whether two specs differ in how the range is found at most."""
    return own.spec.but(observe=None, eps=None) == use.spec.but(observe=None, eps=None)


def refuse(backend: Backend, refused: list[Refused]) -> None:
    """Raise one error that names every place a config asks too much of."""
    if not refused:
        return
    first = refused[0]
    same = [one for one in refused if one.spec == first.spec]
    where = f"{first.place}, by the config's rule {first.setting.rule}"
    what = f"backend {backend.name!r} cannot run {name_of(first.spec)}: {first.reason}"
    if len(refused) > 1:
        more = f"; and {len(refused) - MAX_PLACES} more" if len(refused) > MAX_PLACES else ""
        what = f"{what} (and {len(refused) - 1} more)"
        where = f"{where}; {'; '.join(map(str, refused[1:MAX_PLACES]))}{more}"
    lengths = [one.length for one in same]
    raise AnnotationError(
        what, where=where, advice=f"{_other_groups(lengths)}choose another spec in the config, or FLOAT"
    )


def _other_groups(lengths: Iterable[int | None]) -> str:
    """The group sizes that would do everywhere, as the beginning of an advice."""
    known = [length for length in lengths if length is not None]
    if not known:
        return ""
    fitting = [str(size) for size in GROUP_SIZES if all(length % size == 0 for length in known)]
    every = "all of them" if len(known) > 1 else "it"
    if fitting:
        return f"groups of {' or '.join(fitting[:3])} divide {every}; or "
    return f"no group size divides {every}: use INT8_WEIGHT_ONLY, which has a scale for each channel; or "
