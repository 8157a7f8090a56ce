"""Range reduction where sums of two products could overflow: as little as possible, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, cast

from torch import Tensor, fx
from torch._ops import OpOverload

from quantc.errors import QuantcError
from quantc.integer.proof.factors import Factors, Weights, layout_of, weight_by_channel
from quantc.integer.proof.integer_ranges import Levels
from quantc.integer.proof.pair_sum_ranges import largest_activation
from quantc.integer.proof.weight_fitting import PairFit
from quantc.ir.decisions import Derived, Fixed, Quantize
from quantc.ir.dialect import FACTORS, argument, op_name, position
from quantc.ir.plan import Group, Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.spec.formats import PerChannel, PerTensor, Scheme
from quantc.spec.granularity import normal_axis
from quantc.spec.instruction_sets import INSTRUCTION_SETS, InstructionSet, PairSums
from quantc.spec.numerics import QParams, quantize, to_significant_bits
from quantc.spec.spec import QuantSpec

RangeReduction = Literal["auto", "no", "weights", "activations"]
"""The range to narrow where the backend's instruction set adds pairs: none, the weights of the channels that need it, or
their activations; "auto" is weights, and activations where a weight cannot be made coarser."""


@dataclass(frozen=True, eq=False)
class NarrowedRange:
    """A conv or matmul that adds pairs, with the sharing groups of its operands in the plan."""

    node: fx.Node
    instructions: InstructionSet
    x: Group
    other: Group
    weight: Tensor | None
    """Its constant second operand, in float; None if it has none."""


@dataclass
class Reduction:
    """A range reduction. `found` are the qparams so far; those of weights are replaced there."""

    program: Program
    places: Places
    found: dict[str, QParams]
    notes: list[str] = field(default_factory=list)
    specs: dict[str, QuantSpec] = field(default_factory=dict)
    """By the name of a group: its new spec."""

    def __post_init__(self) -> None:
        self._groups = {site: group for group in self.program.plan.groups for site in group.places}

    def run(self, what: RangeReduction) -> None:
        """Reduce ranges wherever pair sums could overflow."""
        for product in self.products() if what != "no" else ():
            if what != "activations" and self._why_not_coarser(product) is None:
                self._narrow_weights(product)
            elif self._is_unsafe(product):
                self._narrow_otherwise(product, what)

    # -- which products ----------------------------------------------------------------------------------------

    def products(self) -> Iterator[NarrowedRange]:
        """The products of quantized factors on instruction sets that add pairs."""
        targets = self.program.plan.instruction_sets
        for graph in self.places.paths:
            for node in graph.nodes:
                claim = self.program.plan.claims.get(node)
                if claim is None or op_name(node) not in FACTORS:
                    continue
                instructions = INSTRUCTION_SETS.get(targets.get(claim.quantizer, ""))
                found = self._product(node, instructions) if instructions is not None else None
                if found is not None:
                    yield found

    def _product(self, node: fx.Node, instructions: InstructionSet) -> NarrowedRange | None:
        x, other = (self._group(node, name) for name in FACTORS[op_name(node)])
        if instructions.pairs is None or x is None or other is None:
            return None
        name = FACTORS[op_name(node)][1]
        fitted = self.program.plan.fitted.get(_operand_site(self.places, node, name))
        weight = self.program.tensor(argument(node, name)) if fitted is None else fitted
        return NarrowedRange(node, instructions, x, other, None if weight is None else weight.detach())

    def _group(self, node: fx.Node, name: str) -> Group | None:
        """The group of an operand: its own, or that of the tensor it reads. None if it is read in float."""
        found = group_of_factor(self.places, self._groups, node, name)
        return found if found is not None and not isinstance(found.outcome, Derived) else None

    def _spec(self, group: Group) -> QuantSpec:
        return self.specs.get(group.name, cast(Quantize | Fixed, group.outcome).spec)

    def levels(self, group: Group) -> Levels:
        """The integers of a group, as far as its range was reduced."""
        spec = self._spec(group)
        return Levels(spec.qmin, spec.qmax, spec.dtype.storage)

    def _factors(self, product: NarrowedRange) -> Factors:
        """The integers as they are so far."""
        if product.weight is None:
            return Factors(product.node, self.levels(product.x), self.levels(product.other))
        spec = self._spec(product.other)
        levels = quantize(product.weight, self.found[product.other.name], spec)
        view = weight_by_channel(product.node, levels)
        return Factors(product.node, self.levels(product.x), Weights(view, view, levels.dtype.is_signed))

    def _is_unsafe(self, product: NarrowedRange) -> bool:
        """True if pair sums can overflow."""
        sums, found = _sums(product), self._factors(product)
        return found.is_bytes and bool(found.pairs(sums).beyond(sums.bits).any())

    def _place(self, product: NarrowedRange) -> str:
        return self.program.describe(product.node)

    def _note_unsafe(self, product: NarrowedRange, why: str) -> None:
        self.notes.append(f"{self._place(product)} can still saturate: {why}")

    # -- what is done ------------------------------------------------------------------------------------------

    def _why_not_coarser(self, product: NarrowedRange) -> str | None:
        """The reason why the scales of a weight cannot be raised per output channel; None if they can."""
        if product.weight is None:
            return "it has no weight"
        group = product.other
        if bool(self.found[group.name].zero_point.any()) or not _by_output(product, self._spec(group)):
            return "its weight is not symmetric per output channel"
        return None

    def _narrow_weights(self, product: NarrowedRange) -> None:
        """Raise the scales of the channels that can overflow."""
        group, sums, x = product.other, _sums(product), self.levels(product.x)
        if product.weight is None or not x.is_byte:
            return
        qparams = self.found[group.name]
        weights = weight_by_channel(product.node, product.weight)
        spec = self._spec(group)
        scale = to_significant_bits(PairFit(weights, spec, x, sums).least(qparams.scale), spec.scale_bits, up=True)
        raised, factor = int((scale > qparams.scale).sum()), float((scale / qparams.scale).max())
        if not raised:
            return
        self.found[group.name] = QParams(scale, qparams.zero_point)
        self.notes.append(
            f"{self._place(product)}: {raised} of {scale.numel()} weight scales raised, by up to {factor:.4g} times, "
            f"for pairs in {sums.bits} bits on {product.instructions.name}"
        )

    def _narrow_otherwise(self, product: NarrowedRange, what: RangeReduction) -> None:
        """Narrow the activations if weights are not to be made coarser, or cannot be. Two activations that multiply each other are
        narrowed only on request: both would lose precision, and few kernels multiply them as bytes."""
        if what == "weights" or (what == "auto" and product.weight is None):
            self._note_unsafe(product, f'{self._why_not_coarser(product)}; reduce_range="activations" would do')
        else:
            self._narrow_activations(product)

    def _narrow_activations(self, product: NarrowedRange) -> None:
        """Lower the largest activation, for all that share its scale."""
        sums, group = _sums(product), product.x
        qmax = largest_activation(self._factors(product), sums)
        if group.source is Source.RUN_TIME and qmax is not None and self._spec(group).qmin == 0:
            qmax = 2 ** (qmax + 1).bit_length() // 2 - 1  # kernels that quantize themselves do so to whole bits
        why = self._why_not_narrower(group, qmax)
        if why is not None:
            self._note_unsafe(product, why)
            return
        spec = self._spec(group)
        self.specs[group.name] = spec.but(qmax=qmax)
        self.notes.append(
            f"{self._place(product)}: activations {spec.qmin}..{qmax} instead of {spec.qmin}..{spec.qmax}, "
            f"for pairs in {sums.bits} bits on {product.instructions.name}"
        )

    def _why_not_narrower(self, group: Group, qmax: int | None) -> str | None:
        """The reason why the activations of a group cannot end at `qmax`; None if they can."""
        if not isinstance(group.outcome, Quantize):
            return "the scale of its activations is fixed"
        if qmax is None:
            return "no smaller range of its activations would do"
        spec = self._spec(group)
        if spec.scheme is Scheme.SYMMETRIC and spec.dtype.is_signed:
            return "its activations are symmetric about zero"
        return None


def group_of_factor(places: Places, groups: dict[Site, Group], node: fx.Node, name: str) -> Group | None:
    """Sharing group of an operand by name: its own, or that of the tensor it reads."""
    return groups.get(_operand_site(places, node, name)) or groups.get(places.out(argument(node, name)))


def _operand_site(places: Places, node: fx.Node, name: str) -> Site:
    """The operand site of an argument by name."""
    index = position(cast(OpOverload, node.target), name)
    return places.use(node, sum(isinstance(given, fx.Node) for given in node.args[:index]))


def _sums(product: NarrowedRange) -> PairSums:
    found = product.instructions.pairs
    if found is None:
        raise QuantcError(f"{product.instructions.name} adds no pairs", advice="ask only of instruction sets that do")
    return found


def _by_output(product: NarrowedRange, spec: QuantSpec) -> bool:
    """True if the weight's scales are by output channel."""
    if isinstance(spec.granularity, PerTensor):
        return True
    if not isinstance(spec.granularity, PerChannel) or product.weight is None:
        return False
    rank = product.weight.dim()
    axis = {"rows": 0, "transposed": 1, "columns": rank - 1}[layout_of(op_name(product.node))]
    return normal_axis(spec.granularity.axis, rank) == axis
