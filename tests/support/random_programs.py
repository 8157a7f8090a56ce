"""Random eager programs: small models whose `forward` runs a list of steps, for laws that eager PyTorch judges.

A net is planned by running it: each step is tried on real tensors, and one that PyTorch refuses is left out. So every
net runs, whatever mix of shapes, views, copies and writes in place it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

SHAPE = (2, 4, 3, 5)
"""Of both inputs. All sizes differ, so that a wrong axis shows."""
GIVEN = ("x", "y", "scale", "shift", "state")
"""What a net starts from: its inputs, a parameter and a buffer by channel, and a buffer it may write to."""


@dataclass(frozen=True)
class Kind:
    """One kind of step: `run(number, *operands)`. `made` builds the module that such a step calls."""

    arity: int
    run: Callable[..., Any] | None = None
    made: Callable[[int, Tensor], nn.Module] | None = None


def _conv(n: int, x: Tensor) -> nn.Module:
    channels, dims = x.shape[1], x.dim() - 2
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    size = (1, 3)[n % 2]
    out, groups = (channels, channels) if n % 5 == 0 else ((3, 4)[n % 2], 1)
    return kind(channels, out, size, padding="same" if n % 7 == 0 else size // 2, groups=groups, bias=n % 3 > 0)


def _conv_transpose(n: int, x: Tensor) -> nn.Module:
    channels, dims = x.shape[1], x.dim() - 2
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    groups = 2 if channels % 2 == 0 and n % 2 else 1
    return kind(channels, 4, 3, padding=1, groups=groups, bias=n % 3 > 0)


def _norm(n: int, x: Tensor) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[x.dim()]
    norm = kind(x.shape[1], affine=n % 3 > 0)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_(0.0, 0.2)
    norm.running_var.uniform_(0.5, 1.5)
    return norm


MODULES = {
    "conv": Kind(1, made=_conv),
    "conv_transpose": Kind(1, made=_conv_transpose),
    "linear": Kind(1, made=lambda n, x: nn.Linear(x.shape[-1], (3, 4, 5)[n % 3], bias=n % 2 > 0)),
    "norm": Kind(1, made=_norm),
    "dropout": Kind(1, made=lambda n, x: nn.Dropout(0.5, inplace=n % 2 > 0)),
    "rectify": Kind(1, made=lambda n, x: (nn.ReLU(), nn.ReLU6(), nn.ReLU(inplace=True), nn.Hardtanh())[n % 4]),
    "layer_norm": Kind(1, made=lambda n, x: nn.LayerNorm(x.shape[-1])),
}


def _one_of(arity: int, *variants: Callable[..., Any]) -> Kind:
    return Kind(arity, lambda n, *operands: variants[n % len(variants)](*operands))


ARITHMETIC = {
    "relu": _one_of(1, F.relu, F.relu6, torch.sigmoid, torch.neg, torch.tanh, F.hardtanh, torch.abs),
    "clamp": _one_of(
        1,
        lambda a: a.clamp(-0.5, 0.5),
        lambda a: a.clamp(min=0),
        lambda a: torch.clip(a, max=1),
        lambda a: a.clamp_min(-1),
    ),
    "add": _one_of(2, torch.add, lambda a, b: torch.add(a, b, alpha=2), torch.sub, lambda a, b: b + a),
    "gate": _one_of(2, lambda a, b: a * torch.sigmoid(b), lambda a, b: torch.tanh(b).mul(a)),
    "number": _one_of(
        1, lambda a: a * 2, lambda a: 1 + a, lambda a: a - 0.5, lambda a: a / 4, lambda a: 3 - a, lambda a: -0.5 * a
    ),
    "cat": _one_of(2, lambda a, b: torch.cat([a, b], 1), lambda a, b: torch.cat([a, b])),
    "stack": _one_of(2, lambda a, b: torch.stack([a, b], dim=1).mean(1)),
    "mean": _one_of(1, lambda a: a.mean(-1, keepdim=True), lambda a: a.sum(1), torch.mean, lambda a: a.amax(0)),
    "matmul": _one_of(2, lambda a, b: torch.matmul(a, b).tanh(), lambda a, b: (a @ b.mT).tanh()),
    "pool": _one_of(
        1, lambda a: F.max_pool2d(a, 2), lambda a: F.avg_pool2d(a, 2), lambda a: F.adaptive_avg_pool2d(a, 1)
    ),
    "indices": _one_of(1, lambda a: F.max_pool2d(a, 2, return_indices=True)[0]),
    "mask": _one_of(1, lambda a: a.masked_fill(a > 0, -1.0), lambda a: torch.where(a > 0, a, -a)),
    "made": _one_of(1, torch.zeros_like, lambda a: torch.full_like(a, 2.0), torch.ones_like),
    "counted": _one_of(0, lambda: torch.arange(5.0), lambda: torch.ones(4, 1, 1) * 3, lambda: torch.zeros(SHAPE)),
}
VIEWS = {
    "copy": _one_of(
        1, torch.clone, lambda a: a.contiguous(), torch.detach, lambda a: a.to(a.dtype), lambda a: a.detach().clone()
    ),
    "swap": _one_of(
        1, lambda a: a.transpose(0, -1), lambda a: a.transpose(-1, -2), lambda a: a.mT, lambda a: a.movedim(0, 1)
    ),
    "turn": _one_of(1, lambda a: a.permute(*range(1, a.dim()), 0)),
    "flatten": _one_of(1, lambda a: a.flatten(1), torch.flatten, lambda a: a.reshape(a.shape[0], -1)),
    "view": _one_of(1, lambda a: a.view(-1), lambda a: a.view(a.shape), lambda a: a.view(-1, a.shape[-1])),
    "like": _one_of(
        2,
        lambda a, b: a.reshape(b.shape),
        lambda a, b: a.expand_as(b),
        lambda a, b: a.type_as(b),
        lambda a, b: a.view_as(b),
    ),
    "part": _one_of(
        1,
        lambda a: a[:, :2],
        lambda a: a[0],
        lambda a: a[..., -1],
        lambda a: a.narrow(0, 0, 1),
        lambda a: a.select(-1, 0),
        lambda a: a[:, ::2],
    ),
    "unsqueeze": _one_of(1, lambda a: a.unsqueeze(0), lambda a: a.squeeze(0), lambda a: a.unsqueeze(-1), torch.squeeze),
    "expand": _one_of(1, lambda a: a.expand(2, *a.shape)),
    "chunk": _one_of(1, lambda a: a.chunk(2, 1), lambda a: a.split(2, 0), lambda a: a.unbind(0)),
    "copied": _one_of(1, lambda a: torch.view_copy(a, (-1,)), lambda a: torch.slice_copy(a, 0, 0, 1), torch.t_copy),
}
WRITES = {
    "relu_": _one_of(
        1, torch.relu_, lambda a: F.relu(a, inplace=True), lambda a: a.neg_(), lambda a: a.clamp_(-0.5, 0.5)
    ),
    "number_": _one_of(
        1, lambda a: a.mul_(2), lambda a: a.add_(1), lambda a: a.sub_(0.5), lambda a: a.zero_(), lambda a: a.fill_(0.5)
    ),
    "add_": _one_of(2, lambda a, b: a.add_(b), lambda a, b: a.sub_(b, alpha=2), lambda a, b: a.lerp_(b, 0.5)),
    "gate_": _one_of(2, lambda a, b: a.mul_(torch.sigmoid(b))),
    "copy_": _one_of(2, lambda a, b: a.copy_(b)),
    "set_": _one_of(2, lambda a, b: _assigned(a, b, 0), lambda a, b: _assigned(a, b, (slice(None), slice(2)))),
    "mixed_": _one_of(
        2,
        lambda a, b: a.add_(b.double()),
        lambda a, b: a.mul_(b > 0),
        lambda a, b: a.copy_(b.half()),
        lambda a, b: a.gt_(b),
    ),
    "mask_": _one_of(2, lambda a, b: a.masked_fill_(b > 0, 0.25), lambda a, b: a.masked_fill_(a > 0, 0.5)),
    "reshape_": _one_of(1, lambda a: a.unsqueeze_(0), lambda a: a.transpose_(0, 1), lambda a: a.squeeze_()),
}
KINDS: dict[str, Kind] = {**MODULES, **ARITHMETIC, **VIEWS, **WRITES}


def _assigned(a: Tensor, b: Tensor, where: Any) -> Tensor:
    part = b[where]
    if a[where].shape != part.shape:
        raise ValueError("broadcasting is for the other kinds")
    a[where] = part
    return a


@dataclass(frozen=True)
class Step:
    kind: str
    number: int
    operands: tuple[int, ...]
    module: str = ""
    """The name of the module it calls, if it does."""
    gives: int = 1

    def run(self, net: nn.Module, values: list[Any]) -> list[Any]:
        operands = [values[index] for index in self.operands]
        run = KINDS[self.kind].run
        result = getattr(net, self.module)(*operands) if run is None else run(self.number, *operands)
        return list(result) if isinstance(result, tuple | list) else [result]


class Net(nn.Module):
    """A model that runs its steps; value 0 is `x`, and each step adds the values it gives."""

    shift: Tensor
    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4, 1, 1).uniform_(0.5, 1.5))
        self.register_buffer("shift", torch.randn(4, 1, 1))
        self.register_buffer("state", torch.randn(SHAPE))
        self.steps: list[Step] = []
        self.outputs: tuple[int, ...] = ()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        values: list[Any] = [x, y, self.scale, self.shift, self.state]
        for step in self.steps:
            values += step.run(self, values)
        return tuple(values[index] for index in self.outputs)

    def __repr__(self) -> str:
        """The steps as they would be written, for whoever reads a counterexample."""
        names, lines = list(GIVEN), []
        for step in self.steps:
            operands = ", ".join(names[index] for index in step.operands)
            made = f" = {getattr(self, step.module)}" if step.module else ""
            lines.append(f"v{len(names)} = {step.kind}[{step.number}]({operands}){made}")
            names += [f"v{len(names) + part}" for part in range(step.gives)]
        return "\n".join(["Net:", *lines, f"return {', '.join(names[index] for index in self.outputs)}"])


def inputs(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator, dtype=dtype), torch.randn(SHAPE, generator=generator, dtype=dtype)


GENTLE = (*MODULES, *ARITHMETIC, *VIEWS)
WILD = (*GENTLE, *WRITES, *WRITES)


@st.composite
def nets(draw: st.DrawFn, kinds: tuple[str, ...] = WILD, *, most: int = 16, dtype: torch.dtype = torch.float32) -> Net:
    """Models in eval mode. No gradients are asked for: with them, PyTorch forbids writing to some views."""
    places = st.integers(0, 63)
    rows = st.tuples(st.sampled_from(kinds), st.integers(0, 6), places, places)
    wanted = draw(st.lists(rows, min_size=1, max_size=most))
    ends = draw(st.lists(places, min_size=1, max_size=3))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        net = Net().to(dtype).eval().requires_grad_(False)
        values: list[Any] = [*inputs(0, dtype), net.scale.clone(), net.shift.clone(), net.state.clone()]
        for kind, number, *operands in wanted:
            known = len(values)
            plan(net, values, Step(kind, number, tuple(_place(i, known) for i in operands[: KINDS[kind].arity])))
        net.outputs = tuple(_place(end, len(values)) for end in ends)
    return net


def _place(number: int, known: int) -> int:
    """Any value, or one of the latest: chains, views of views, and writes to those are what is sought."""
    return known - 1 - number // 2 % min(4, known) if number % 2 else number // 2 % known


def plan(net: Net, values: list[Any], step: Step) -> None:
    """Add a step to a net and run it, unless PyTorch or sense refuses it."""
    if step.kind in WRITES and 0 in values[step.operands[0]].stride():
        return  # several elements in one place
    if step.kind == "reshape_" and not _is_known_once(values, step.operands[0]):
        return
    name = f"{step.kind}_{len(net.steps)}"
    try:
        if (made := KINDS[step.kind].made) is not None:
            first = values[step.operands[0]]
            net.add_module(name, made(step.number, first).to(first.dtype).eval().requires_grad_(False))
            step = replace(step, module=name)
        results = step.run(net, values)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError):
        net._modules.pop(name, None)
        return
    if not _weights_are_kept(net, values) or not all(0 < value.numel() < 4000 for value in results):
        net._modules.pop(name, None)
        return
    net.steps.append(replace(step, gives=len(results)))
    values += results


def _is_known_once(values: list[Any], index: int) -> bool:
    """A tensor that is known by two names, or to the caller, must not be given another shape behind their backs."""
    return index >= len(GIVEN) and sum(value is values[index] for value in values) == 1


def _weights_are_kept(net: Net, values: list[Any]) -> bool:
    """Nets write to their inputs and to one buffer, but not to their weights; undoes it if one did."""
    is_kept = torch.equal(values[2], net.scale) and torch.equal(values[3], net.shift)
    values[2].copy_(net.scale)
    values[3].copy_(net.shift)
    return is_kept


__all__ = ["GENTLE", "WILD", "Net", "Step", "inputs", "nets", "plan"]
