"""Comparing a captured program with the model it came from."""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.zoo import Case, detached


@dataclass(frozen=True)
class Run:
    """What one call gave, and what it left in its arguments."""

    output: Any
    arguments: Any


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Run:
    """Call without gradients, on copies of the arguments."""
    given, named = detached(args), detached(kwargs or {})
    with torch.no_grad():
        output = function(*given, **named)
    return Run(output, (given, named))


def fingerprint(model: nn.Module) -> str:
    """A digest of everything a caller could notice to be different about a model."""
    digest = hashlib.sha256()
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        digest.update(repr((name, type(module), module.training, hooks, sorted(vars(module)))).encode())
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        digest.update(repr((name, id(tensor), tensor.dtype, tuple(tensor.shape), tensor.requires_grad)).encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def assert_same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """The same tree of the same types holding the same numbers: bit for bit, unless a tolerance is given, which is
    relative to the largest magnitude of the tensor."""
    left, left_spec = pytree.tree_flatten(actual)
    right, right_spec = pytree.tree_flatten(expected)
    assert left_spec == right_spec
    for index, (got, want) in enumerate(zip(left, right, strict=True)):
        assert type(got) is type(want) or isinstance(got, Tensor), f"leaf {index}: {type(got)} for {type(want)}"
        if not isinstance(want, Tensor):
            assert got == want, f"leaf {index}"
            continue
        largest = want.detach().abs().max().item() if tolerance and want.numel() and want.dtype != torch.bool else 0.0
        torch.testing.assert_close(
            got.detach(), want.detach(), rtol=0, atol=tolerance * largest, equal_nan=True, msg=_at_leaf(index)
        )


def _at_leaf(index: int) -> Callable[[str], str]:
    return lambda text: f"leaf {index}: {text}"


def assert_agrees(case: Case, program: Callable[..., Any], *, batches: tuple[int, ...] = (2, 2)) -> nn.Module:
    """Run model and program side by side on fresh inputs; outputs and what is written to inputs must agree.

    Gives back the eager model as the calls left it."""
    model = copy.deepcopy(case.model())
    limit = 1e-6 if case.inexact else 0.0
    for seed, batch in enumerate(batches):
        args, kwargs = case.example(seed, batch)
        expected = run(model, args, kwargs)
        actual = run(program, args, kwargs)
        assert_same(actual.output, expected.output, limit)
        assert_same(actual.arguments, expected.arguments)
    return model


def loss(output: Any) -> Tensor:
    """One number that depends on every float of an output."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.double().square().mean() + leaf.double().mean() for leaf in leaves]).sum()


def train_step(model: Callable[..., Any], args: tuple[Any, ...], seed: int) -> Any:
    """Forward and backward with the random numbers of `seed`; gives the output."""
    torch.manual_seed(seed)
    output = model(*detached(args))
    torch.autograd.backward(loss(output))
    return output


def assert_same_training(program: nn.Module, model: nn.Module, batches: Sequence[tuple[Any, ...]]) -> None:
    """Train both side by side: outputs, gradients, buffers and updated parameters must agree bit for bit."""
    initial = buffers(model)
    for seed, args in enumerate(batches):
        actual, expected = train_step(program, args, seed), train_step(model, args, seed)
        assert_same(detached(actual), detached(expected))
        assert_same_gradients(program, model)
        for side in (program, model):
            descend(side)
    assert_same_buffers(program, model, initial)


def assert_same_gradients(program: nn.Module, model: nn.Module) -> None:
    """Gradients are equal under any of a parameter's names; a parameter without one may be missing."""
    theirs = dict(program.named_parameters(remove_duplicate=False))
    aliases: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[parameter].append(name)
    for parameter, names in aliases.items():
        known = [name for name in names if name in theirs]
        assert known or parameter.grad is None, f"{names[0]} is missing"
        for name in known:
            assert_same(theirs[name].grad, parameter.grad)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.05)
                parameter.grad = None


def assert_same_buffers(program: nn.Module, model: nn.Module, initial: Mapping[str, Tensor]) -> None:
    """Every buffer is the same in both. Only one that the calls left as it was may be missing from the program."""
    theirs = dict(program.named_buffers(remove_duplicate=False))
    for name, buffer in model.named_buffers():
        if name not in theirs:
            assert torch.equal(buffer, initial[name]), f"the program has no buffer {name}, which the model wrote to"
            continue
        assert torch.equal(theirs[name], buffer), f"{name}: {theirs[name]} for {buffer}"


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's buffers."""
    return {name: buffer.clone() for name, buffer in model.named_buffers()}
