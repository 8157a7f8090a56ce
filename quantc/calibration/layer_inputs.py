"""The tensors that quantized layers read, as rows: one for each product with their weights.

A linear reads the last axis of a tensor, a convolution its patches. Layers that read one tensor in the same way (query, key
and value of an attention) share its rows. A grouped convolution is a small problem for each group; so is each row of a
table that is looked up, whose only input is 1 where its index is asked for, else 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from quantc.calibration.windows import TransposedWindow, Window
from quantc.ir.decisions import Quantize
from quantc.ir.dialect import argument, is_op, row_of
from quantc.ir.op_row import Family
from quantc.ir.plan import Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.observe.module import behind, observer_nodes
from quantc.observe.reservoir import row_keys, smallest

CONVOLUTIONS = (Family.CONV, Family.CONV_TRANSPOSE)
FEW = 128
"""Rows of a batch that are taken whatever they cost."""


@dataclass(frozen=True, slots=True)
class LayerInput:
    """The rows of one tensor, and the layers that read them."""

    value: fx.Node
    window: Window | None
    """None for the last axis as it is."""
    site: str
    groups: int
    width: int
    """Channels of a group's rows: those of a patch."""
    readers: tuple[fx.Node, ...]
    outputs: int
    """Output channels of a group, of all readers together."""
    statistics: str = "gram"
    """What tells how its rows are distributed."""

    @property
    def axis(self) -> int:
        """The axis of the channels, from the last."""
        return -1 if self.window is None else -1 - len(self.window.kernel)

    @property
    def name(self) -> str:
        """The key of its statistics."""
        return self.site if self.window is None else f"{self.site} {self.window}"

    def rows(self, x: Tensor, batch: int, share: float = 1.0, most: int | None = None) -> Tensor:
        """Rows as float32 `[groups, rows, channels]`. A share below 1 takes those of the smallest hashes, `kept` of them; so
        does a limit, `most`."""
        x = x.detach().float()
        view = x.reshape(-1, self.width) if self.window is None else self.window.patches(x)
        places = view.shape[: view.dim() - self._inner]
        total = math.prod(places)
        kept = self.kept(total, share) if most is None else min(total, most)
        if kept == total:
            found = view.reshape(total, self.groups, self.width)
        else:
            chosen = smallest(row_keys(batch, total), kept).sort().values
            found = view[torch.unravel_index(chosen, places)].reshape(kept, self.groups, self.width)
        # the model may overwrite the tensor before the rows are added
        return found.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def kept(self, total: int, share: float) -> int:
        """The number of rows taken of a batch's: a share of them, and no fewer than there are channels, up to a limit, as a
        Gram of fewer says too little."""
        return min(total, max(math.ceil(total * share), min(self.width, FEW)))

    def by_output(self, weight: Tensor) -> Tensor:
        """A weight by groups, `[groups, outputs, inputs]`, as rows meet it."""
        return weight.reshape(self.groups, -1, self.width) if self.window is None else self.window.by_output(weight)

    def as_weight(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `by_output`."""
        return rows.reshape(shape) if self.window is None else self.window.as_weight(rows, shape)

    @property
    def _inner(self) -> int:
        return 1 if self.window is None else 1 + len(self.window.kernel)


def layer_inputs(program: Program) -> list[LayerInput]:
    """The inputs of the linears and convolutions whose weights the plan quantizes, in the order of the program."""
    return _shared(_each(program))


def lookups(program: Program) -> list[LayerInput]:
    """The indices by which tables are looked up that the plan quantizes, in the order of the program."""
    places, observers = Places(program), observer_nodes(program)
    found = []
    for node in quantized_weights(program, places):
        if not is_op(node, "embedding"):
            continue
        indices, table = (
            behind(argument(node, "indices"), observers),
            program.tensor(behind(argument(node, "w"), observers)),
        )
        if isinstance(indices, fx.Node) and indices.op != "get_attr" and table is not None:
            site, (entries, width) = str(places.out(indices)), table.shape
            found.append(LayerInput(indices, None, site, entries, 1, (node,), width, "tokens"))
    return _shared(found)


def _shared(each: Iterable[LayerInput]) -> list[LayerInput]:
    """One for all that read a tensor in the same way."""
    found: dict[tuple[fx.Node, Window | None, int], LayerInput] = {}
    for own in each:
        key = (own.value, own.window, own.groups)
        if (known := found.get(key)) is not None:
            own = replace(known, readers=known.readers + own.readers, outputs=known.outputs + own.outputs)
        found[key] = own
    return list(found.values())


def _each(program: Program) -> Iterator[LayerInput]:
    places, observers = Places(program), observer_nodes(program)
    for node in quantized_weights(program, places):
        row = row_of(node)
        if row is None or not (row.family in CONVOLUTIONS or is_op(node, "linear")):
            continue
        x, weight = behind(argument(node, "x"), observers), program.tensor(behind(argument(node, "w"), observers))
        if not isinstance(x, fx.Node) or x.op == "get_attr" or weight is None:
            continue
        window = _window(node, weight, row.family) if row.family in CONVOLUTIONS else None
        shape = torch.Size((1, *weight.shape)) if window is None else window.by_output(weight).shape
        groups, outputs = shape[0], shape[1]
        yield LayerInput(x, window, str(places.out(x)), groups, weight.numel() // (groups * outputs), (node,), outputs)


def quantized_weights(program: Program, places: Places) -> Iterator[fx.Node]:
    """The ops that read a constant which the plan quantizes by its own values."""
    found: dict[fx.Node, None] = {}
    for group in program.plan.groups:
        if group.source is not Source.CONSTANTS or not isinstance(group.outcome, Quantize):
            continue
        for site in group.places:
            if site.operand is not None:
                found[places.node(site)] = None
    order = {node: index for index, node in enumerate(program.nodes())}
    return iter(sorted(found, key=order.__getitem__))


def _window(node: fx.Node, weight: Tensor, family: Family) -> Window:
    axes = weight.dim() - 2
    stride, padding, dilation = (_each_axis(argument(node, name), axes) for name in ("stride", "padding", "dilation"))
    kernel, groups = tuple(weight.shape[2:]), int(argument(node, "groups"))
    if family is Family.CONV:
        return Window(kernel, stride, padding, dilation, groups)
    more = _each_axis(argument(node, "output_padding"), axes)
    return TransposedWindow(kernel, stride, padding, dilation, groups, more)


def _each_axis(sizes: list[int], axes: int) -> tuple[int, ...]:
    return tuple(sizes) * axes if len(sizes) == 1 else tuple(sizes)
