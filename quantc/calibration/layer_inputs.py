"""The tensors that quantized layers read, as rows: one for each product with their weights.

A linear reads the last axis of a tensor, a convolution its patches. Layers that read one tensor in the same way (query, key
and value of an attention) share its rows. A grouped convolution is a small problem for each group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from quantc.ir.decisions import Quantize
from quantc.ir.dialect import argument, is_op, row_of
from quantc.ir.op_row import Family
from quantc.ir.plan import Source
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.observe.module import behind, observer_nodes
from quantc.observe.reservoir import row_keys, smallest


@dataclass(frozen=True, slots=True)
class Window:
    """The patches that a convolution reads."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def __str__(self) -> str:
        parts = [f"window {_sizes(self.kernel)}"]
        parts += [f"stride {_sizes(self.stride)}"] if set(self.stride) != {1} else []
        parts += [f"padding {_sizes(self.padding)}"] if set(self.padding) != {0} else []
        parts += [f"dilation {_sizes(self.dilation)}"] if set(self.dilation) != {1} else []
        parts += [f"groups {self.groups}"] if self.groups > 1 else []
        return " ".join(parts)

    def patches(self, x: Tensor) -> Tensor:
        """A view of shape `[samples, *places, channels, *kernel]`."""
        axes = len(self.kernel)
        x = x if x.dim() == axes + 2 else x.unsqueeze(0)
        margins = [margin for size in reversed(self.padding) for margin in (size, size)]
        x = torch.nn.functional.pad(x, margins).contiguous() if any(margins) else x.contiguous()
        rows = list(zip(x.shape[2:], self.kernel, self.stride, self.dilation, strict=True))
        places = [(size - step * (width - 1) - 1) // stride + 1 for size, width, stride, step in rows]
        samples, channels, *steps = x.stride()
        return x.as_strided(
            (x.shape[0], *places, x.shape[1], *self.kernel),
            (
                samples,
                *(step * stride for step, stride in zip(steps, self.stride, strict=True)),
                channels,
                *(step * gap for step, gap in zip(steps, self.dilation, strict=True)),
            ),
        )


def _sizes(values: tuple[int, ...]) -> str:
    return "x".join(map(str, values))


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

    @property
    def axis(self) -> int:
        """The axis of the channels, from the last."""
        return -1 if self.window is None else -1 - len(self.window.kernel)

    @property
    def name(self) -> str:
        """The key of its statistics."""
        return self.site if self.window is None else f"{self.site} {self.window}"

    def rows(self, x: Tensor, batch: int, share: float = 1.0) -> Tensor:
        """Rows as float32 `[groups, rows, channels]`. A share below 1 takes those of the smallest hashes."""
        x = x.detach().float()
        view = x.reshape(-1, self.width) if self.window is None else self.window.patches(x)
        places = view.shape[: view.dim() - self._inner]
        total = math.prod(places)
        kept = math.ceil(total * share) if total else 0
        if kept == total:
            found = view.reshape(total, self.groups, self.width)
        else:
            chosen = smallest(row_keys(batch, total), kept).sort().values
            found = view[torch.unravel_index(chosen, places)].reshape(kept, self.groups, self.width)
        # the model may overwrite the tensor before the rows are added
        return found.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    @property
    def _inner(self) -> int:
        return 1 if self.window is None else 1 + len(self.window.kernel)


def layer_inputs(program: Program) -> list[LayerInput]:
    """The inputs of the linears and convolutions whose weights the plan quantizes, in the order of the program."""
    found: dict[tuple[fx.Node, Window | None], LayerInput] = {}
    for own in _each(program):
        known = found.get((own.value, own.window))
        if known is not None:
            own = replace(known, readers=known.readers + own.readers, outputs=known.outputs + own.outputs)
        found[own.value, own.window] = own
    return list(found.values())


def _each(program: Program) -> Iterator[LayerInput]:
    places, observers = Places(program), observer_nodes(program)
    for node in quantized_weights(program, places):
        row = row_of(node)
        if row is None or not (row.family is Family.CONV or is_op(node, "linear")):
            continue
        x, weight = behind(argument(node, "x"), observers), program.tensor(behind(argument(node, "w"), observers))
        if not isinstance(x, fx.Node) or x.op == "get_attr" or weight is None:
            continue
        window = _window(node, weight) if row.family is Family.CONV else None
        groups = 1 if window is None else window.groups
        width = weight[0].numel()
        yield LayerInput(x, window, str(places.out(x)), groups, width, (node,), weight.shape[0] // groups)


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


def _window(node: fx.Node, weight: Tensor) -> Window:
    axes = weight.dim() - 2
    stride, padding, dilation = (_each_axis(argument(node, name), axes) for name in ("stride", "padding", "dilation"))
    return Window(tuple(weight.shape[2:]), stride, padding, dilation, int(argument(node, "groups")))


def _each_axis(sizes: list[int], axes: int) -> tuple[int, ...]:
    return tuple(sizes) * axes if len(sizes) == 1 else tuple(sizes)
