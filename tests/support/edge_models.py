"""Unusual but legal models: what a capture has to follow besides layers in a row."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

Make = Callable[[], Any]


@dataclass(frozen=True)
class Edge:
    """A model with inputs. `fx_refuses` and `export_refuses` hold a word of the reason where a method cannot take it."""

    name: str
    build: Make
    inputs: Callable[[], tuple[Any, ...]]
    export_refuses: str = ""
    fx_refuses: str = ""
    training: bool = False

    def __str__(self) -> str:
        return self.name


EDGES: list[Edge] = []


def rows() -> tuple[Any, ...]:
    return (torch.randn(2, 4),)


def edge(name: str, build: Make, inputs: Callable[[], tuple[Any, ...]] = rows, **facts: Any) -> None:
    EDGES.append(Edge(name, build, inputs, **facts))


def module(forward: Callable[..., Any], **parts: Make) -> Make:
    """A module class with a given forward and parts."""

    def make(self: nn.Module) -> None:
        nn.Module.__init__(self)
        for name, build in parts.items():
            setattr(self, name, build())

    return type("Edge", (nn.Module,), {"__init__": make, "forward": forward})


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


@torch.library.custom_op("quantc_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x: Tensor, factor: float = 2.0) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("quantc_tests::no_shape", mutates_args=())
def no_shape(x: Tensor) -> Tensor:
    return x * 3


@torch.library.custom_op("quantc_tests::bump_", mutates_args={"x"})
def bump_(x: Tensor) -> None:
    x.add_(1)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x.clamp(min=0) * 2

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


doubled: Callable[..., Any] = Doubling.apply
pruned: Make = lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)  # type: ignore[no-untyped-call]  # noqa: E731


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    layer.register_forward_hook(lambda _, args, output: output + args[0])
    return layer


def hooked_keywords() -> nn.Module:
    layer = module(lambda self, x, factor=1.0: x * factor)()
    layer.register_forward_pre_hook(lambda _, args, kwargs: (args, {"factor": 3.0}), with_kwargs=True)
    layer.register_forward_hook(lambda _, args, kwargs, output: output * kwargs["factor"], with_kwargs=True)
    return layer  # type: ignore[no-any-return]


def patched_forward() -> nn.Module:
    layer = nn.Linear(4, 4)
    original = layer.forward
    layer.forward = lambda input: original(input) * 2  # type: ignore[method-assign]  # noqa: A006
    return layer


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Any:
        return w.triu() + w.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric())


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(4, 4))


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


class Counts(nn.Module):
    """State that results do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()
        self.count, self.seen, self.cache = 0, [0], None

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        self.seen.append(self.count)
        self.cache = self.fc(x)
        return self.cache + 1  # type: ignore[operator]


class CachesTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        if "t" not in self.tables:
            self.tables["t"] = torch.arange(4.0)
        return x + self.tables["t"]


class Holds(nn.Module):
    """Something that cannot be copied."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.fc, self.held = linear(), make()

    def forward(self, x: Tensor) -> Any:
        return self.fc(x) + 1


class NoCopies(Holds):
    def __init__(self) -> None:
        super().__init__(int)

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies of me")


class Derived(nn.Module):
    """Tensors that are no leaves of the gradient graph, which deepcopy refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.fc: Any = linear()
        self.doubled = self.fc.weight * 2
        self.triples = [self.fc.weight * 3]

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.doubled) + F.linear(x, self.triples[0])


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = linear(), nn.BatchNorm1d(4)
        self.b, self.bn2 = self.a, self.bn

    def forward(self, x: Tensor) -> Any:
        return self.bn2(self.b(self.bn(self.a(x))))


class Collections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})
        self.listed = nn.ParameterList([torch.randn(4)])
        self.parts = nn.ModuleDict({"z": linear()})
        self.register_buffer("kept", torch.randn(4), persistent=False)
        self.absent: Tensor | None
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Any:
        for value in (*self.named.values(), *self.listed):
            x = x * value
        return self.parts["z"](x) + self.kept if self.absent is None else x


@torch.inference_mode()
def in_inference(self: Any, x: Tensor) -> Any:
    return self.fc(x) + 1


def in_autocast(self: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = self.fc(x)
    return y.float() + 1


def writes_to_input(self: Any, x: Tensor) -> Any:
    x.mul_(2)
    x[0] = 1
    x += 1
    return x.sum()


def writes_through_view(self: Any, x: Tensor) -> Any:
    x.view(-1).add_(1)
    return x * 2


def bumps(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    bump_(y)
    return y.relu()


def asks_what_it_is(self: Any, x: Any) -> Any:
    answers = [isinstance(x, Tensor), torch.is_tensor(x), isinstance(self.fc.weight, nn.Parameter)]
    return x + 1 if all(answers) and not isinstance(x, nn.Parameter) else x - 1


def patches(self: Any, x: Tensor) -> Any:
    b, c, h, w = x.shape
    y = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(b, (h // 2) * (w // 2), -1)
    return torch.einsum("bnd,bmd->bnm", y, y)


def drawn(self: Any, x: Tensor) -> Any:
    return x + torch.rand(2, 4) * torch.randn_like(x) + torch.bernoulli(x.sigmoid()) + torch.randint(0, 5, (2, 4))


def same() -> tuple[Any, ...]:
    x = torch.randn(2, 4)
    return x, x


def images() -> tuple[Any, ...]:
    return (torch.randn(2, 3, 8, 8),)


FLAT = {"fc": linear}
edge("hooks on a part", module(lambda self, x: self.fc(x), fc=hooked))
edge("hooks on the model", hooked)
edge("hooks with keywords", hooked_keywords)
edge("forward of an instance", patched_forward)
edge("forward of a part", module(lambda self, x: self.fc(x), fc=patched_forward))
edge("weight norm, old", module(lambda self, x: self.fc(x), fc=old_weight_norm))
edge("weight norm", module(lambda self, x: self.fc(x), fc=lambda: parametrizations.weight_norm(nn.Linear(4, 4))))
edge("spectral norm", module(lambda self, x: self.fc(x), fc=lambda: parametrizations.spectral_norm(nn.Linear(4, 4))))
edge(
    "spectral norm, training",
    module(lambda self, x: self.fc(x), fc=lambda: parametrizations.spectral_norm(nn.Linear(4, 4))),
    training=True,
)
edge("parametrized", module(lambda self, x: self.fc(x), fc=parametrized))
edge("pruned", module(lambda self, x: self.fc(x), fc=pruned))
edge("custom op", module(lambda self, x: scaled(self.fc(x), 3.0).relu(), **FLAT))
edge("op without shapes", module(lambda self, x: no_shape(self.fc(x)).relu(), **FLAT), export_refuses="no fake impl")
edge("custom op that writes", module(bumps, **FLAT))
edge("autograd function", module(lambda self, x: doubled(self.fc(x)) + 1, **FLAT))
edge("lambda", module(lambda self, x: self.f(self.fc(x)), f=lambda: lambda t: t.sin() + 1, **FLAT))
edge("scripted part", module(lambda self, x: self.part(x) + 1, part=scripted), export_refuses="TorchScript")
edge("data parallel", lambda: nn.DataParallel(nn.Linear(4, 4)))
edge(
    "compiled part", module(lambda self, x: self.fc(x) + 1, fc=lambda: torch.compile(nn.Linear(4, 4), backend="eager"))
)
edge("compiled model", lambda: torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager"))
edge("checkpoint", module(lambda self, x: checkpoint(self.fc, x, use_reentrant=False) + 1, **FLAT))
edge("inference mode", module(in_inference, **FLAT))
edge("autocast", module(in_autocast, **FLAT), fx_refuses="autocast")
edge("counts", Counts)
edge("caches a table", CachesTable)
edge("holds a lock", lambda: Holds(threading.Lock))
edge("holds a generator", lambda: Holds(lambda: (i for i in range(3))))
edge("refuses copies", NoCopies)
edge("derived tensors", Derived)
edge("shared modules", Shared)
edge("collections", Collections)
edge("asks what it is", module(asks_what_it_is, **FLAT))
edge("draws", module(drawn))
edge(
    "double precision",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(True)).double(),
    lambda: (torch.randn(2, 4).double(),),
)
edge(
    "bfloat16",
    lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(True)).bfloat16(),
    lambda: (torch.randn(2, 4).bfloat16(),),
)
edge(
    "complex", module(lambda self, x: (x * x.conj()).real + x.imag), lambda: (torch.randn(2, 4, dtype=torch.complex64),)
)
edge("fourier", module(lambda self, x: torch.fft.irfft(torch.fft.rfft(x) * 2j, n=4)))
edge("no rows", module(lambda self, x: self.fc(x).relu().sum(0), **FLAT), lambda: (torch.randn(0, 4),))
edge("no dimensions", module(lambda self, x: (x * 2).sin().unsqueeze(0)), lambda: (torch.tensor(3.0),))
edge("integers", module(lambda self, x: (x * 2 + 1) // 3 + x / 2), lambda: (torch.randint(0, 9, (2, 4)),))
edge("bool mask", module(lambda self, x: torch.where(x, 1.0, -1.0) + (~x).float()), lambda: (torch.rand(2, 4) > 0.5,))
edge("transposed input", module(lambda self, x: self.fc(x).reshape(-1), **FLAT), lambda: (torch.randn(4, 2).t(),))
edge(
    "channels last",
    module(lambda self, x: self.conv(x).flatten(1), conv=lambda: nn.Conv2d(3, 4, 3)),
    lambda: (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),),
)
edge("one tensor twice", module(lambda self, x, y: x + y * 2), same)
edge("one tensor twice, written", module(lambda self, x, y: (x.add_(1), y * 2)[1]), same)
edge("input as output", module(lambda self, x: (x, x, x + 1)))
edge("constants as output", module(lambda self, x: (torch.ones(3), None, 5, "text", 2.5, True, x)))
edge("nothing as output", module(lambda self, x: None))
edge("nested output", module(lambda self, x: {"a": [x + 1, (x * 2, {"b": x})], "c": x.relu()}))
edge("same output twice", module(lambda self, x: (self.fc(x),) * 2, **FLAT))
edge("view of a parameter", module(lambda self, x: (self.fc.weight.t(), self.fc(x)), **FLAT))
edge("writes to its input", module(writes_to_input))
edge("writes through a view", module(writes_through_view))
edge("patches", module(patches), images)
edge(
    "embedding bag",
    module(lambda self, x: self.e(x), e=lambda: nn.EmbeddingBag(10, 4)),
    lambda: (torch.randint(0, 10, (2, 4)),),
)
edge("mask selects", module(lambda self, x: x[x > 0].sum() + x.nonzero().sum()))
edge(
    "shadows a method",
    module(lambda self, x: x * self.double, double=lambda: torch.tensor(2.0)),
    export_refuses="double",
)
edge("unique", module(lambda self, x: x.round().unique().sum()))
edge("new tensors", module(lambda self, x: x + x.new_tensor([1.0, 2, 3, 4]) + x.new_full((4,), 2.0) + torch.tensor(2)))
edge("types by name", module(lambda self, x: x.type(torch.float64) + x.type("torch.HalfTensor").type_as(x)))
edge("written out=", module(lambda self, x: torch.add(x, 1, out=torch.empty(2, 4)) * 2))
edge("copies a part", module(lambda self, x: copy.copy(self.fc)(x), **FLAT))
edge("normal in place", module(lambda self, x: x.clone().normal_() + torch.empty(2, 4).exponential_()))
