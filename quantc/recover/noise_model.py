"""What quantization will cost, by channel group: the noise that rounding weights and activations adds to what layers
compute.

Noise is counted where it is read. Of a tensor between layers, noise `n_j` of channel j adds `n_j Σ_o W_oj²` to the output of
the layer that reads it, relative to that output's mean square. The noise of rounded weights `E` on output o of a layer is
`E_o G E_oᵀ` with the Gram matrix `G` of what it reads, and that of an activation with steps of Δ is `Δ² / 12`. All of it is
in the units of the program as it is, so that a program with factors is priced by the same statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, fx

from quantc.calibration.collect import channels_of, key_of
from quantc.calibration.layer_inputs import LayerInput, layer_inputs
from quantc.ir.decisions import Quantize
from quantc.ir.dialect import argument
from quantc.ir.plan import Group, Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.observe.extremes import Extremes
from quantc.observe.module import behind, observer_nodes
from quantc.observe.observation_registry import start
from quantc.recover.channel_classes import Labels
from quantc.recover.channel_groups import ChannelGroup, ChannelGroups, Use
from quantc.recover.objective import Objective, why_not
from quantc.spec.formats import Scheme
from quantc.spec.halves import Halves
from quantc.spec.numerics import fake_quantize
from quantc.spec.spec import QuantSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerNoise:
    """The rounded weights of a layer."""

    node: fx.Node
    weight: Tensor
    spec: QuantSpec
    up: Tensor
    """The class of each row, in the weight's layout."""
    down: Tensor
    """The class of each column; `FIXED` where the tensor it reads has none."""
    rows: LayerInput
    objective: Objective
    share: float
    """What noise on its output counts: one over the mean square of that."""
    value: Tensor
    """What noise on each output counts where it is read, `[groups, outputs]`."""

    def of(self, factors: Tensor, *, is_fit: bool = False) -> float:
        """The noise with some factors of classes, the last of which is 1."""
        up, down = factors[self.up], factors[self.down]
        scaled = (self.weight.double() * up / down).float()
        observation = start(self.spec)
        observation.update(scaled)
        rounded = fake_quantize(scaled, observation.qparams(self.spec), self.spec)
        change = (scaled.double() - rounded.double()) * down / up
        moments = self.objective.fit if is_fit else self.objective.judge
        error = moments.error(change.reshape(self.rows.groups, -1, self.rows.width))
        return float((error * self.value).sum())


@dataclass(frozen=True, slots=True, eq=False)
class TensorNoise:
    """A quantized tensor that layers read."""

    node: fx.Node
    spec: QuantSpec
    classes: Tensor
    """The class of each channel."""
    ranges: Halves
    value: Tensor
    """What noise on each channel counts."""

    def ends(self, *, is_fit: bool = False) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value of each channel, with 0 between."""
        found = cast(Extremes, self.ranges.even if is_fit else self.ranges.odd)
        if found.low is None or found.high is None:
            zero = torch.zeros(len(self.classes))
            return zero, zero
        return found.low.reshape(-1).clamp(max=0), found.high.reshape(-1).clamp(min=0)

    def of(self, factors: Tensor, *, is_fit: bool = False) -> float:
        own = factors[self.classes]
        low, high = ((each.double() * own) for each in self.ends(is_fit=is_fit))
        step = float(self.width(low.min(), high.max())) / (self.spec.levels - 1)
        return step**2 / 12 * float((self.value / own.square()).sum())

    def width(self, low: Tensor, high: Tensor) -> Tensor:
        """The width of a range on the tensor's grid."""
        return high - low if self.spec.scheme is Scheme.AFFINE else 2 * torch.maximum(high, -low)


@dataclass(frozen=True, slots=True, eq=False)
class NoiseModel:
    """The noise of everything that factors change."""

    layers: tuple[LayerNoise, ...]
    tensors: tuple[TensorNoise, ...]
    unknown: Mapping[fx.Node, str]
    """Ops with quantized constants that cannot be priced: why."""

    def why_not(self, group: ChannelGroup) -> str | None:
        """The reason why a group cannot be priced."""
        nodes = [*group.makers, *group.readers]
        reason = next((self.unknown[node] for node in nodes if node in self.unknown), None)
        layers = {layer.node for layer in self.layers}
        return reason or (None if layers & set(nodes) else "no weight is quantized that it meets")

    def parts(self, classes: Tensor) -> tuple[LayerNoise | TensorNoise, ...]:
        """What the factors of some classes change the noise of."""
        layers = [each for each in self.layers if _meets(each.up, classes) or _meets(each.down, classes)]
        return *layers, *(each for each in self.tensors if _meets(each.classes, classes))


def _meets(own: Tensor, classes: Tensor) -> bool:
    return bool(torch.isin(own, classes).any())


def noise_model(program: Program, groups: ChannelGroups) -> NoiseModel:
    """The noise model of a calibrated program. It takes the Gram matrices and extremes that were collected."""
    return _Builder(program, groups).model()


class _Builder:
    def __init__(self, program: Program, groups: ChannelGroups) -> None:
        self.program, self.groups = program, groups
        self.places, self.observers = Places(program), observer_nodes(program)
        self.of_site = {site: group for group in program.plan.groups for site in group.places}
        self.uses: dict[tuple[fx.Node, fx.Node], Use] = {(use.reader, use.constant): use for use in groups.uses}
        self.unknown: dict[fx.Node, str] = {}
        self.energy = torch.zeros(groups.count + 1, dtype=torch.float64)
        """What noise on a channel of each class counts where it is read."""

    def model(self) -> NoiseModel:
        inputs = [(node, rows) for rows in layer_inputs(self.program) for node in rows.readers]
        known = {node: found for node, rows in inputs if (found := self._layer(node, rows)) is not None}
        for use in self.groups.uses:
            self._count(use, known.get(use.reader))
        layers = tuple(self._valued(each) for each in known.values())
        tensors = tuple(self._tensors(dict(inputs), known))
        return NoiseModel(layers, tensors, self.unknown)

    def _group(self, node: fx.Node, name: str) -> Group | None:
        value = argument(node, name)
        return self.of_site.get(self.places.use(node, self.places.operands(node).index(value)))

    def _layer(self, node: fx.Node, rows: LayerInput) -> LayerNoise | None:
        group, constant = self._group(node, "w"), behind(argument(node, "w"), self.observers)
        use, weight = self.uses.get((node, constant)), self.program.tensor(constant)
        if group is None or not isinstance(group.outcome, Quantize) or use is None or weight is None:
            return None
        collected = self.program.plan.collected.get(key_of("gram", rows.name))
        if collected is None or why_not([collected], (rows.groups, rows.width)) is not None:
            return None
        weight = weight.detach().float()
        objective = Objective.of([collected])
        value = objective.fit.error(rows.by_output(weight))
        power = float(value.sum()) or 1.0
        up, down = (_spread(labels, weight) for labels in (use.up, use.down))
        value = torch.full_like(value, 1 / power)
        return LayerNoise(node, weight, group.outcome.spec, up, down, rows, objective, 1 / power, value)

    def _count(self, use: Use, layer: LayerNoise | None) -> None:
        """Add what a reader makes of noise to the classes it reads; note it if it cannot be priced."""
        group = self._quantized(use)
        if layer is None and group is not None and group.source is Source.CONSTANTS:
            self.unknown[use.reader] = f"nothing is known of the rows that {self.program.describe(use.reader)} reads"
        if use.undone is None:
            return
        weight = self.program.tensor(use.constant)
        if weight is None:
            return
        square = weight.detach().double().square()
        share = layer.share if layer is not None else 1 / (float(square.sum()) or 1.0)
        labels = _spread(use.undone, weight)
        self.energy.index_add_(0, labels.reshape(-1) % len(self.energy), (square * share).reshape(-1))

    def _quantized(self, use: Use) -> Group | None:
        """The group of a constant at its reader, if it is quantized by its own values."""
        operands = self.places.operands(use.reader)
        for index, value in enumerate(operands):
            if behind(value, self.observers) is use.constant:
                group = self.of_site.get(self.places.use(use.reader, index))
                return group if group is not None and isinstance(group.outcome, Quantize) else None
        return None

    def _valued(self, layer: LayerNoise) -> LayerNoise:
        """The layer with what its outputs count where they are read, if they are in a group."""
        rows = layer.up.reshape(layer.rows.groups, -1, layer.rows.width)[:, :, 0]
        read = self.energy[rows]
        value = torch.where((rows >= 0) & (read > 0), read, layer.value)
        return replace(layer, value=value)

    def _tensors(
        self, inputs: Mapping[fx.Node, LayerInput], known: Mapping[fx.Node, LayerNoise]
    ) -> Iterator[TensorNoise]:
        readers: dict[tuple[fx.Node, int], list[LayerNoise]] = {}
        for layer in known.values():
            readers.setdefault((layer.rows.value, layer.rows.axis), []).append(layer)
        for (value, axis), layers in readers.items():
            node = layers[0].node
            group = self._group(node, "x")
            if group is None or not isinstance(group.outcome, Quantize):
                continue
            ranges = self.program.plan.collected.get(key_of("extremes", channels_of(inputs[node].site, axis)))
            if ranges is None or not ranges.odd.seen or not ranges.even.seen:
                self.unknown[node] = (
                    f"no ranges of the channels that {self.program.describe(node)} reads were collected"
                )
                continue
            counts = sum(_columns(each) for each in layers)
            yield TensorNoise(value, group.outcome.spec, _by_channel(layers[0]), ranges, cast(Tensor, counts))


def _columns(layer: LayerNoise) -> Tensor:
    """What noise on each channel that a layer reads counts in its output."""
    square = layer.weight.double().square().reshape(layer.rows.groups, -1, *layer.weight.shape[1:]).sum(1)
    return square.reshape(square.shape[0] * square.shape[1], -1).sum(1) * float(layer.share)


def _by_channel(layer: LayerNoise) -> Tensor:
    """The class of each channel that a layer reads."""
    groups = layer.rows.groups
    first = layer.down.reshape(groups, -1, *layer.down.shape[1:])[:, 0]
    return first.reshape(groups * first.shape[1], -1)[:, 0]


def _spread(labels: Labels | None, weight: Tensor) -> Tensor:
    """Labels as a tensor of the weight's shape."""
    if labels is None:
        return torch.full((1,) * weight.dim(), -1).expand(weight.shape)
    return torch.from_numpy(labels).expand(weight.shape)


__all__ = ["LayerNoise", "NoiseModel", "TensorNoise", "noise_model"]
