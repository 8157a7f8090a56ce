"""One row of the model zoo: how to build a model, what to feed it, and what capture owes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

BATCH = 2
"""The batch size of example inputs. Not 1: sizes 0 and 1 are special to broadcasting, and so to torch.export."""

Inputs = Callable[[int], tuple[Any, ...]]


def no_keywords(batch: int) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """A model of the zoo.

    `inputs` and `keywords` make arguments for a batch size; they draw from torch's global generator, which `example`
    seeds. Where capture cannot give everything, the row says why, in words: an empty string means "no excuse".
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    keywords: Callable[[int], dict[str, Any]] = no_keywords
    fx_refuses: str = ""
    """Why symbolic tracing cannot take the model."""
    dumps_differ: str = ""
    """Why the two captures do not give the same canonical program."""
    inexact: str = ""
    """Why captured and eager results agree to 1e-6 only, not bit for bit."""
    fixed_batch: str = ""
    """Why the batch size cannot be made dynamic."""
    shape_free: bool = False
    """Whether symbolic tracing needs no example inputs."""
    tags: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return self.name

    def model(self) -> nn.Module:
        """The model in eval mode, the same weights each time, with running statistics that are not the defaults."""
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            model = self.build()
            for name, buffer in model.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_(0.0, 0.2)
                elif name.endswith("running_var"):
                    buffer.uniform_(0.5, 1.5)
        return model.eval()

    def example(self, seed: int = 0, batch: int = BATCH) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords for one call."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.inputs(batch), self.keywords(batch)


def floats(*shape: int) -> Inputs:
    """One float tensor of `batch, *shape`."""
    return lambda batch: (torch.randn(batch, *shape),)


def tokens(length: int, vocabulary: int = 32) -> Inputs:
    """One tensor of token numbers, `batch, length`."""
    return lambda batch: (torch.randint(0, vocabulary, (batch, length)),)


def tags(*names: str) -> frozenset[str]:
    return frozenset(names)


def detached(tree: Any) -> Any:
    """A deep copy of the tensors of a tree, so that a model that writes to its inputs cannot disturb a comparison."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
