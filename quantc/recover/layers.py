"""The layers whose weights can be fitted: a weight of the plan, what its layers read, and the grid it is rounded to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from quantc.calibration.collect import key_of
from quantc.calibration.layer_inputs import LayerInput, layer_inputs, lookups
from quantc.calibration.qparams import own_qparams
from quantc.errors import QuantcError
from quantc.integer.proof.factors import weight_by_channel
from quantc.integer.proof.range_reduction import RangeReduction, Reduction
from quantc.ir.decisions import Derived, Quantize
from quantc.ir.dialect import argument, position
from quantc.ir.plan import Group, Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.observe.module import behind, observer_nodes
from quantc.recover.objective import Objective, why_not
from quantc.recover.pair_limits import PairLimit
from quantc.recover.rounding import Grid
from quantc.spec.formats import PerChannel, PerGroup, PerTensor
from quantc.spec.granularity import group_view, normal_axis
from quantc.spec.halves import Halves
from quantc.spec.numerics import QParams, dequantize, fake_quantize, quantize
from quantc.spec.spec import QuantSpec


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """One layer that reads a weight."""

    node: fx.Node
    input: LayerInput
    site: Site
    """The operand site of the weight."""
    bias: Site | None
    """The operand site of the bias; None if it has none."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A weight, with its scales, and all that read it."""

    name: str
    group: Group
    spec: QuantSpec
    qparams: QParams
    """As the plan would be carried out: ranges are reduced."""
    open_qparams: QParams
    """Before they are."""
    limit: PairLimit | None
    weight: Tensor
    """The float values."""
    current: Tensor
    """The values after rounding, so far."""
    bias: Tensor | None
    """The float bias of its only reader; None where it has none, or there are several."""
    shift: Tensor | None
    """The change of that bias so far, `[groups, outputs]`."""
    reads: tuple[Read, ...]
    objective: Objective
    bias_step: Tensor | None = None
    """The step of the accumulator's grid, `[groups, outputs]`; None where the bias stays float."""

    @property
    def input(self) -> LayerInput:
        return self.reads[0].input

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor of the weight's shape by groups, `[groups, outputs, inputs]`."""
        return self.input.by_output(tensor)

    def as_weight(self, rows: Tensor) -> Tensor:
        """The inverse of `rows`."""
        return self.input.as_weight(rows, self.weight.shape)

    def grid(self, qparams: QParams) -> Grid:
        """The numbers that the weights may take."""
        scale, zero_point = spread(qparams, self.weight, self.spec)
        window = self.input.window
        taps = 1 if window is None else math.prod(window.kernel)
        near = None if self.limit is None else self.limit.neighbours(self.input.width // taps, taps)
        return Grid(self.rows(scale.double()), self.rows(zero_point.double()), self.spec.qmin, self.spec.qmax, near)

    def numbers(self, qparams: QParams) -> Tensor:
        """The number of the scale of each weight, by groups."""
        every = torch.arange(qparams.scale.numel()).reshape(qparams.scale.shape)
        return self.rows(spread(QParams(every, every), self.weight, self.spec)[0])

    def levels(self, weight: Tensor, qparams: QParams) -> Tensor:
        """Levels of weights on a grid, by groups."""
        return self.rows(quantize(weight, qparams, self.spec).double())

    def weight_at(self, levels: Tensor, qparams: QParams) -> Tensor:
        """The weight that the program will hold for some levels."""
        return dequantize(self.as_weight(levels).to(self.spec.dtype.storage), qparams, self.spec)

    def fits(self, weight: Tensor, qparams: QParams) -> Tensor:
        """The outputs, `[groups, outputs]`, whose sums of neighbours stay in their bits on these scales."""
        every = torch.ones(self.rows(weight).shape[:2], dtype=torch.bool)
        if self.limit is None or bool(qparams.zero_point.any()):
            return every
        found = self.limit.fits(weight_by_channel(self.reads[0].node, weight), qparams.scale, self.spec)
        return found.reshape(every.shape) if found.dim() else every & found

    def power(self) -> Tensor:
        """Mean square of each output on the half that judges, `[groups, outputs]`."""
        return self.objective.judge.error(self.rows(self.weight))

    def error(self, weight: Tensor, shift: Tensor | None) -> Tensor:
        """Mean squared error of each output on the half that judges, for rounded weights and a change of the bias."""
        return self.objective.judge.error(self.rows(self.weight.double() - weight.double()), shift)

    def steadying(self, weight: Tensor) -> Tensor:
        """What is added to `error` so that weights that hardly met any input count too."""
        return self.objective.judge.steadying(self.rows(self.weight.double() - weight.double()))


def spread(qparams: QParams, like: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each weight."""
    share = spec.granularity
    if isinstance(share, PerTensor):
        return qparams.scale.expand(like.shape), qparams.zero_point.expand(like.shape)
    if isinstance(share, PerChannel):
        shape = [1] * like.dim()
        shape[normal_axis(share.axis, like.dim())] = -1
        return qparams.scale.reshape(shape).expand(like.shape), qparams.zero_point.reshape(shape).expand(like.shape)
    if not isinstance(share, PerGroup):
        raise QuantcError(
            f"the scales of {share} are not of weights", advice="choose per tensor, per channel or per group"
        )
    view, axis = group_view(like, share)
    return tuple(x.unsqueeze(axis).expand(view.shape).reshape(like.shape) for x in (qparams.scale, qparams.zero_point))  # type: ignore[return-value]


def layers_of(program: Program, reduce_range: RangeReduction) -> Iterator[Layer | tuple[str, str]]:
    """The layers of a calibrated program, in its order; of those that cannot be fitted the name and the reason."""
    facts = _Facts.of(program, reduce_range)
    for group in program.plan.groups:
        if group.source is Source.CONSTANTS and isinstance(group.outcome, Quantize) and group.values:
            name = program.describe(facts.places.node(group.places[0]))
            found = facts.layer(group, group.outcome.spec, name)
            yield (name, found) if isinstance(found, str) else found


@dataclass(frozen=True, slots=True, eq=False)
class _Facts:
    """What is known of the weights of a program."""

    program: Program
    places: Places
    reads: Mapping[str, list[Read]]
    """By group."""
    qparams: Mapping[str, QParams]
    """As the plan would be carried out."""
    own: Mapping[str, QParams]
    """Before ranges are reduced."""
    limits: Mapping[str, PairLimit]
    of_site: Mapping[Site, Group]

    @staticmethod
    def of(program: Program, reduce_range: RangeReduction) -> _Facts:
        places = Places(program)
        own = own_qparams(program, places)
        qparams = dict(own)
        reduction = Reduction(program, places, qparams)
        reduction.run(reduce_range)
        limits: dict[str, PairLimit] = {}
        for product in reduction.products():
            if product.instructions.pairs is not None and product.weight is not None and reduce_range != "no":
                limit = PairLimit(product.instructions.pairs, reduction.levels(product.x))
                known = limits.get(product.other.name)
                limits[product.other.name] = limit if known is None else known.with_other(limit)
        of_site = {site: group for group in program.plan.groups for site in group.places}
        reads: dict[str, list[Read]] = {}
        for found in (*layer_inputs(program), *lookups(program)):
            for node in found.readers:
                read = _read(places, node, found)
                reads.setdefault(of_site[read.site].name if read.site in of_site else "", []).append(read)
        return _Facts(program, places, reads, qparams, own, limits, of_site)

    def layer(self, group: Group, spec: QuantSpec, name: str) -> Layer | str:
        reads = self.reads.get(group.name, [])
        if (reason := _why_not_fitted(group, spec, reads)) is not None:
            return reason
        weight = self.program.tensor(self.places.node(group.values[0]))
        shape = (reads[0].input.groups, reads[0].input.width)
        seen = self._collected(reads)
        if weight is None or seen is None:
            return f"no {'counts were' if reads[0].input.statistics == 'tokens' else 'Gram matrix was'} collected of what it reads"
        if (reason := why_not(seen, shape)) is not None:
            return reason
        weight = weight.detach().float()
        qparams = self.qparams[group.name]
        current = self.program.plan.fitted.get(reads[0].site)
        if current is None:
            current = fake_quantize(weight, qparams, spec)
        bias, shift = _bias(self.program, self.places, reads)
        if shift is not None:
            shift = shift.reshape(reads[0].input.groups, -1)
        limit = self.limits.get(group.name)
        if limit is not None and not limit.binds(spec):
            limit = None
        return Layer(
            name,
            group,
            spec,
            qparams,
            self.own[group.name],
            limit,
            weight,
            current,
            bias,
            shift,
            tuple(reads),
            Objective.of(seen, shape[0]),
            self._bias_step(reads, reads[0].input.by_output(weight).shape[:2]),
        )

    def _bias_step(self, reads: list[Read], shape: torch.Size) -> Tensor | None:
        """The product of the scales of a layer's operands, where its bias is an integer on that grid."""
        group = self.of_site.get(reads[0].bias) if reads[0].bias is not None and len(reads) == 1 else None
        if group is None or not isinstance(group.outcome, Derived):
            return None
        scales = [self.qparams[self.of_site[site].name].scale.double() for site in group.outcome.sites]
        step = math.prod(scales[1:], start=scales[0])
        return step.expand(shape.numel()).reshape(shape)

    def _collected(self, reads: list[Read]) -> list[Halves] | None:
        """What was collected of all that layers read, of the kind that tells most."""
        for kind in dict.fromkeys((reads[0].input.statistics, "moments")):
            found = [self.program.plan.collected.get(key_of(kind, read.input.name)) for read in reads]
            if (seen := [each for each in found if each is not None]) and len(seen) == len(found):
                return seen
        return None


def _bias(program: Program, places: Places, reads: list[Read]) -> tuple[Tensor | None, Tensor | None]:
    """The constant bias of an only reader, and how it was changed."""
    site = reads[0].bias
    if len(reads) > 1 or site is None:
        return None, None
    bias = program.tensor(behind(places.value(site), observer_nodes(program)))
    if bias is None:
        return None, None
    bias = bias.detach()
    changed = program.plan.fitted.get(site)
    return bias, None if changed is None else changed.double() - bias.double()


def _why_not_fitted(group: Group, spec: QuantSpec, reads: list[Read]) -> str | None:
    if spec.dtype.is_float:
        return f"its format is {spec.dtype.value}, which has no grid"
    if len(group.values) != 1:
        return "it shares its scale with other tensors"
    if not reads or {site for site in group.places if site.operand is not None} != {read.site for read in reads}:
        return "nothing is known of the rows that it meets"
    if len({(read.input.groups, read.input.width) for read in reads}) > 1:
        return "its readers read rows of different widths"
    return None


def _read(places: Places, node: fx.Node, found: LayerInput) -> Read:
    has_bias = position(cast(OpOverload, node.target), "b") >= 0 and isinstance(argument(node, "b"), fx.Node)
    return Read(node, found, _operand(places, node, "w"), _operand(places, node, "b") if has_bias else None)


def _operand(places: Places, node: fx.Node, name: str) -> Site:
    """The operand site of an argument."""
    value = argument(node, name)
    operands = places.operands(node)
    return places.use(node, operands.index(value))
