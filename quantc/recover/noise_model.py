"""What quantization will cost, by channel group: the noise that rounding weights and activations adds to what layers
compute.

Noise is counted where it is read. Of a tensor between layers, noise `n_j` of channel j adds `n_j W_oj²` to output o of the
layer that reads it. Outputs count as much as they do where they are read in turn, from the end of the program to its
beginning, and a layer's together so that its output's mean square is 1: factors do not change what noise counts. The noise of
rounded weights `E` on output o of a layer is `E_o G E_oᵀ` with the Gram matrix `G` of what it reads, and that of an
activation with steps of Δ is `Δ² / 12`. All of it is in the units of the program as it is, so that a program with factors is
priced by the same statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
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
    own_value: Tensor
    """What noise on each output counts in the layer's own output, `[groups, outputs]`."""
    value: Tensor
    """What noise on each output counts where it is read, `[groups, outputs]`."""

    @property
    def own(self) -> Tensor:
        """The classes that its noise depends on."""
        return distinct(torch.cat([distinct(self.up), distinct(self.down)]))

    def of(self, factors: Tensor, *, is_fit: bool = False) -> float:
        """The noise with some factors of classes, the last of which is 1."""
        up, down = factors[self.up], factors[self.down]
        scaled = (self.weight.double() * up / down).float()
        observation = start(self.spec)
        observation.update(scaled)
        rounded = fake_quantize(scaled, observation.qparams(self.spec), self.spec)
        change = (scaled.double() - rounded.double()) * down / up
        moments = self.objective.fit if is_fit else self.objective.judge
        error = moments.error(self.rows.by_output(change))
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

    @property
    def own(self) -> Tensor:
        """The classes that its noise depends on."""
        return distinct(self.classes)

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


def distinct(classes: Tensor) -> Tensor:
    """Each class once, in order."""
    return torch.from_numpy(np.unique(classes.numpy()))


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
        followed = ChannelGroups.of(program, follows=True)
        self.channels = {(use.reader, use.constant): use for use in followed.uses}
        self.energy = torch.zeros(followed.count, dtype=torch.float64)
        """What noise on a channel counts where it is read, by the layers so far."""

    def model(self) -> NoiseModel:
        inputs = {node: rows for rows in layer_inputs(self.program) for node in rows.readers}
        order = {node: index for index, node in enumerate(self.program.nodes())}
        found: dict[fx.Node, LayerNoise] = {}
        for use in sorted(self.groups.uses, key=lambda use: -order[use.reader]):
            rows = inputs.get(use.reader)
            layer = None if rows is None else self._layer(use, rows)
            if layer is not None:
                found[use.reader] = layer
            elif (group := self._quantized(use)) is not None and group.source is Source.CONSTANTS:
                told = f"nothing is known of the rows that {self.program.describe(use.reader)} reads"
                self.unknown[use.reader] = told
            self._count(use, layer)
        layers = dict(reversed(found.items()))
        return NoiseModel(tuple(layers.values()), tuple(self._tensors(inputs, layers)), self.unknown)

    def _group(self, node: fx.Node, name: str) -> Group | None:
        value = argument(node, name)
        return self.of_site.get(self.places.use(node, self.places.operands(node).index(value)))

    def _layer(self, use: Use, rows: LayerInput) -> LayerNoise | None:
        node, group = use.reader, self._group(use.reader, "w")
        weight = self.program.tensor(use.constant)
        is_weight = behind(argument(node, "w"), self.observers) is use.constant
        if not is_weight or weight is None or group is None or not isinstance(group.outcome, Quantize):
            return None
        collected = self.program.plan.collected.get(key_of("gram", rows.name))
        if collected is None or why_not([collected], (rows.groups, rows.width)) is not None:
            return None
        weight = weight.detach().float()
        objective = Objective.of([collected])
        power = objective.fit.error(rows.by_output(weight))
        read = self._read(use, rows, weight)
        up, down = (_spread(labels, weight) for labels in (use.up, use.down))
        whole = float((read * power).sum())
        own = read / whole if whole > 0 else torch.zeros_like(read)
        value = read if bool(self._is_read(use)) else own
        return LayerNoise(node, weight, group.outcome.spec, up, down, rows, objective, own, value)

    def _channels(self, use: Use) -> Use:
        """The same use, with the channels as they meet."""
        return self.channels.get((use.reader, use.constant), use)

    def _is_read(self, use: Use) -> bool:
        made = self._channels(use).made
        return made is not None and bool((self.energy[torch.from_numpy(made)] > 0).any())

    def _read(self, use: Use, rows: LayerInput, weight: Tensor) -> Tensor:
        """What noise on each output counts where it is read, `[groups, outputs]`: the same for all if that is unknown."""
        if not self._is_read(use):
            return torch.ones(rows.by_output(weight).shape[:2], dtype=torch.float64)
        return self.energy[rows.by_output(_spread(self._channels(use).made, weight))[:, :, 0]]

    def _count(self, use: Use, layer: LayerNoise | None) -> None:
        """Add what a reader makes of noise to the channels that it reads."""
        undone, weight = self._channels(use).undone, self.program.tensor(use.constant)
        if undone is None or weight is None:
            return
        square, channels = weight.detach().double().square(), _spread(undone, weight)
        if layer is not None:
            channels = layer.rows.by_output(channels)
            counted = layer.rows.by_output(square) * layer.own_value.unsqueeze(2)
        else:
            counted = square / (float(square.sum()) or 1.0)
        self.energy.index_add_(0, channels.reshape(-1), counted.reshape(-1))

    def _quantized(self, use: Use) -> Group | None:
        """The group of a constant at its reader, if it is quantized by its own values."""
        operands = self.places.operands(use.reader)
        for index, value in enumerate(operands):
            if behind(value, self.observers) is use.constant:
                group = self.of_site.get(self.places.use(use.reader, index))
                return group if group is not None and isinstance(group.outcome, Quantize) else None
        return None

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
    counted = layer.rows.by_output(layer.weight.double().square()) * layer.own_value.unsqueeze(2)
    return _inside(layer, counted.sum(1)).sum(1)


def _by_channel(layer: LayerNoise) -> Tensor:
    """The class of each channel that a layer reads."""
    return _inside(layer, layer.rows.by_output(layer.down)[:, 0])[:, 0]


def _inside(layer: LayerNoise, rows: Tensor) -> Tensor:
    """Columns of a layer, `[groups, inputs]`, by channel: those of a patch together."""
    window = layer.rows.window
    return rows.reshape(-1, 1 if window is None else math.prod(window.kernel))


def _spread(labels: Labels | None, weight: Tensor) -> Tensor:
    """Labels as a tensor of the weight's shape."""
    if labels is None:
        return torch.full((1,) * weight.dim(), -1).expand(weight.shape)
    return torch.from_numpy(labels).expand(weight.shape)


__all__ = ["LayerNoise", "NoiseModel", "TensorNoise", "noise_model"]
