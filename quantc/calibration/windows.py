"""The patches that convolutions read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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

    def by_output(self, weight: Tensor) -> Tensor:
        """A weight by groups, `[groups, outputs, inputs * taps]`, as patches meet it."""
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def as_weight(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `by_output`."""
        return rows.reshape(shape)


@dataclass(frozen=True, slots=True)
class TransposedWindow(Window):
    """The patches that a transposed convolution reads: those of its input with zeros between, in mirrored order."""

    more: tuple[int, ...] = ()
    """The sizes added to the output, at the end of each axis."""

    def __str__(self) -> str:
        more = f" more {_sizes(self.more)}" if any(self.more) else ""
        return f"transposed {Window.__str__(self)}{more}"

    def patches(self, x: Tensor) -> Tensor:
        axes = len(self.kernel)
        x = x if x.dim() == axes + 2 else x.unsqueeze(0)
        sizes = [(size - 1) * stride + 1 for size, stride in zip(x.shape[2:], self.stride, strict=True)]
        wide = x.new_zeros(*x.shape[:2], *sizes)
        between: list[Any] = [slice(None, None, stride) for stride in self.stride]
        wide[(..., *between)] = x
        reach = [gap * (width - 1) for gap, width in zip(self.dilation, self.kernel, strict=True)]
        margin = [far - size for far, size in zip(reach, self.padding, strict=True)]
        # mirrored, a patch has its taps in the order of the weight's, and what is added at the end comes first
        pairs = [
            size for far, more in zip(reversed(margin), reversed(self.more), strict=True) for size in (far + more, far)
        ]
        wide = torch.nn.functional.pad(wide.flip([*range(2, axes + 2)]), pairs)
        return Window(self.kernel, (1,) * axes, (0,) * axes, self.dilation, self.groups).patches(wide)

    def by_output(self, weight: Tensor) -> Tensor:
        inputs, outputs, *taps = weight.shape
        found = weight.reshape(self.groups, inputs // self.groups, outputs, *taps)
        return found.transpose(1, 2).reshape(self.groups, outputs, -1)

    def as_weight(self, rows: Tensor, shape: torch.Size) -> Tensor:
        inputs, outputs, *taps = shape
        found = rows.reshape(self.groups, outputs, inputs // self.groups, *taps)
        return found.transpose(1, 2).reshape(shape)


def _sizes(values: tuple[int, ...]) -> str:
    return "x".join(map(str, values))
