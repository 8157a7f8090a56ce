"""What a config asks of a backend's rules: whether it is granted, in which form, or why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from quantc.config import ConfigRule
from quantc.errors import AnnotationError
from quantc.formats import Dynamic, PerChannel, PerGroup, PerTensor, Timing
from quantc.outcomes import Fixed, Float, Quantize
from quantc.program import Program
from quantc.quantizer import Backend
from quantc.resolve import Resolution, Setting
from quantc.selectors import ByAll, ByEdge, ByNode, ByOp
from quantc.spec import name_of
from quantc.types import tensor_type

if TYPE_CHECKING:
    from quantc.patterns.table import Rule

BY_NAME = (ByOp, ByNode, ByEdge)
"""Selectors that mean an op itself, where others mean all that is in a module."""


def why_not_dynamic(rule: Rule, setting: Setting | None) -> str | None:
    """Why a rule cannot have run-time scales, where the config asks for them."""
    if setting is None or not setting.is_dynamic:
        return None
    if rule.dynamic is Dynamic.NO:
        return f"it has no dynamic form, which the config asks for: {setting.rule}"
    if rule.dynamic is Dynamic.NAMED and not isinstance(setting.rule.select, BY_NAME):
        return "it is dynamic only where the config names the op or the node: it costs more than it gains"
    return None


@dataclass(frozen=True)
class Request:
    """What a config asks for at one node; `value` is the tensor it is about, if it is an operand."""

    backend: Backend
    node: fx.Node
    value: fx.Node | None
    setting: Setting

    def granted(self, own: Quantize | Fixed, use: Quantize | Fixed, program: Program) -> Quantize | Fixed:
        """What the config asks for, if the backend can run it.

        What follows from the op is the op's and not the config's: the axis of the channels, the axis that groups lie
        along, and a range known beforehand.
        """
        if use.spec.role is not own.spec.role:
            return own
        if isinstance(own, Fixed) and isinstance(use, Quantize) and _same_numbers(own, use):
            return own
        theirs, ours = use.spec.granularity, own.spec.granularity
        if isinstance(use, Quantize) and isinstance(theirs, PerChannel) and isinstance(ours, PerChannel):
            use = Quantize(use.spec.but(granularity=ours))
        if isinstance(use, Quantize) and isinstance(theirs, PerGroup) and not isinstance(ours, PerGroup):
            use = Quantize(use.spec.but(granularity=PerGroup(axis=_summed_axis(ours), size=theirs.size)))
        reason = self.backend.why_not(use.spec)
        if reason is None and isinstance(theirs, PerChannel) and isinstance(ours, PerTensor):
            reason = "the tensor has no axis of channels here, so granularity must be per-tensor"
        if reason is None and isinstance(use.spec.granularity, PerGroup):
            reason = self._why_not_groups(use.spec.granularity)
        if reason is not None:
            raise AnnotationError(
                f"backend {self.backend.name!r} cannot run {name_of(use.spec)}: {reason}",
                where=f"{program.describe(self.node)}, by the config's rule {self.setting.rule}",
                advice="choose another spec in the config, or FLOAT",
            )
        return use

    def _why_not_groups(self, share: PerGroup) -> str | None:
        kind = None if self.value is None else tensor_type(self.value)
        if kind is None or not share.axis < kind.rank:
            return "the shape of the weight is not known"
        length = kind.shape[share.axis]
        if isinstance(length, int) and length % share.size == 0:
            return None
        sizes = [size for size in (16, 32, 64, 128, 256) if isinstance(length, int) and length % size == 0]
        fitting = f"; {' and '.join(map(str, sizes))} would" if sizes else ""
        return f"groups of {share.size} do not divide the {length} elements of axis {share.axis} of {kind}{fitting}"


def _summed_axis(channels: PerChannel | PerTensor | object) -> int:
    """The axis of a weight that its op sums over, by the one its channels lie on: groups lie along it."""
    return 0 if isinstance(channels, PerTensor) or channels == PerChannel(axis=1) else 1


def _same_numbers(own: Fixed, use: Quantize) -> bool:
    """Whether two specs differ in how the range is found at most."""
    return own.spec.but(observe=None, eps=None) == use.spec.but(observe=None, eps=None)


def refuse_unmet(program: Program, config: Resolution) -> None:
    """A rule of the config that asks for run-time scales, or for weights alone, must come to something somewhere."""
    from quantc.inspect.reasons import Reasons

    settings = [(node, setting) for node, roles in config.nodes.items() for setting in roles.values()]
    settings += [(consumer, setting) for (_, consumer), setting in config.edges.items()]
    places: dict[ConfigRule, list[fx.Node]] = {}
    for node, setting in settings:
        use = setting.rule.use
        if not isinstance(use, Float) and use.spec.timing is not Timing.STATIC:
            places.setdefault(setting.rule, []).append(node)
    for rule, nodes in places.items():
        if isinstance(rule.select, ByAll) or any(node in program.plan.claims for node in nodes):
            continue
        raise AnnotationError(
            f"nothing came of the config's rule {rule}: {Reasons(program)(nodes[0]).text}",
            where=program.describe(nodes[0]),
            advice="leave the rule out, or give it to ops that can: `quantc backends` shows which are dynamic",
        )
