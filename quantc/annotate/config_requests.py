"""Negotiation between a config and a backend's rules: granted, adapted, or refused with a reason."""

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
from quantc.ir.dialect import FACTORS, WEIGHTED, op_name, operands, ops_in
from quantc.ir.op_row import Family
from quantc.ir.program import Program
from quantc.ir.types import tensor_type
from quantc.spec.formats import Offer, PerChannel, PerGroup, PerTensor, PerToken, Timing
from quantc.spec.spec import QuantSpec, name_of

if TYPE_CHECKING:
    from quantc.patterns.table import Rule

BY_NAME = (ByOp, ByNode, ByEdge)
"""Selectors that name an op itself; the others cover everything in a module."""
ACROSS_ROWS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(ops_in(Family.CONV, Family.CONV_TRANSPOSE), ("x",)),
    **{name: (other,) for name, (_, other) in FACTORS.items() if name not in WEIGHTED},
}
"""The operands, by op, whose rows along the last axis are reduced together: per-row scales could not be summed in
integers."""
GROUP_SIZES = (256, 128, 64, 32, 16, 8, 4, 2)
MAX_PLACES = 20
"""Maximum number of sites in an error."""


def timing_of(setting: Setting | None) -> Timing:
    """The technique of a setting; static without one."""
    return Timing.STATIC if setting is None else setting.rule.timing


def is_dynamic(setting: Setting | None) -> bool:
    """True if a setting requests dynamic quantization."""
    return setting is not None and not isinstance(setting.use, Float) and setting.use.spec.timing is Timing.DYNAMIC


def why_not_dynamic(rule: Rule, setting: Setting | None, node: fx.Node, value: fx.Node) -> str | None:
    """The reason why a rule cannot quantize the input `value` of `node` dynamically, where the config requests it."""
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
    """The reason why a rule is not applied statically; `asked` has the setting of each tensor that the rule reads, with
    the node that reads it. One setting that names the op suffices for all."""
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
    """The reason for a rule that applies only if the config names the op, which it does not."""
    return f"it is {timing} only where the config names the op, the node or the layer: it costs more than it gains"


UNNAMED = frozenset(map(only_where_named, Timing))
"""Reasons of rules that the config would have to name the op for."""


def _is_named(setting: Setting, node: fx.Node) -> bool:
    """True if a config rule names an op itself, or the layer whose weight it reads."""
    has_weight = any(value.op == "get_attr" for value in node.all_input_nodes)
    return isinstance(setting.rule.select, BY_NAME) or (setting.is_own and has_weight)


def _adds_rows(node: fx.Node, value: fx.Node) -> bool:
    across = ACROSS_ROWS.get(op_name(node), ())
    return any(name in across and given is value for name, given in operands(node))


@dataclass(frozen=True)
class RefusedRequest:
    """A requested spec that a backend cannot run at a site."""

    spec: QuantSpec
    reason: str
    place: str
    setting: Setting
    length: int | None = None
    """The length of the axis that groups do not divide, where that is the reason."""

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class ConfigRequest:
    """A setting of the config for one node; `value` is the operand it is about, if any."""

    backend: Backend
    node: fx.Node
    value: fx.Node | None
    setting: Setting

    def granted(
        self, own: Quantize | Fixed, use: Quantize | Fixed, program: Program, refused: list[RefusedRequest]
    ) -> Quantize | Fixed:
        """The requested quantization if the backend can run it; else the backend's own, with an entry in `refused`.

        The op determines the channel axis, the group axis and ranges known beforehand, not the config.
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
            refused.append(RefusedRequest(use.spec, reason, program.describe(self.node), self.setting, length))
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
    """The requested quantization with the axes of the op."""
    theirs, ours = use.spec.granularity, own.spec.granularity
    if not isinstance(use, Quantize):
        return use
    if isinstance(theirs, PerChannel) and isinstance(ours, PerChannel):
        return Quantize(use.spec.but(granularity=ours))
    if isinstance(theirs, PerGroup) and not isinstance(ours, PerGroup):
        return Quantize(use.spec.but(granularity=PerGroup(axis=_summed_axis(ours), size=theirs.size)))
    return use


def _has_no_channels(own: Quantize | Fixed, use: Quantize | Fixed) -> bool:
    """True if an op admits no per-channel scales; weight-only ops, which compute in float, take them along any axis."""
    return isinstance(own.spec.granularity, PerTensor) and use.spec.timing is not Timing.WEIGHT_ONLY


def _summed_axis(channels: PerChannel | PerTensor | object) -> int:
    """The reduction axis of a weight, from its channel axis: groups lie along it."""
    return 0 if isinstance(channels, PerTensor) or channels == PerChannel(axis=1) else 1


def _same_numbers(own: Fixed, use: Quantize) -> bool:
    """True if two specs differ at most in how the range is found."""
    return own.spec.but(observe=None, eps=None) == use.spec.but(observe=None, eps=None)


def refuse(backend: Backend, refused: list[RefusedRequest]) -> None:
    """Raise one error that names every refused request."""
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
    """Advice on group sizes that divide every axis."""
    known = [length for length in lengths if length is not None]
    if not known:
        return ""
    fitting = [str(size) for size in GROUP_SIZES if all(length % size == 0 for length in known)]
    every = "all of them" if len(known) > 1 else "it"
    if fitting:
        return f"groups of {' or '.join(fitting[:3])} divide {every}; or "
    return f"no group size divides {every}: use INT8_WEIGHT_ONLY, which has a scale for each channel; or "
