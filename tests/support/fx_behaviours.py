"""What the tests of the FX flow's behaviours have in common: running it, and what became of a model."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils import _pytree as pytree

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao import quantization as ao
    from torch.ao.quantization import quantize_fx as upstream

from quantc.flows.fx import convert_fx, convert_to_reference_fx, prepare_fx, prepare_qat_fx

OBSERVER = "activation_post_process_"


def some(values: Iterable[Any], keep: int = 1) -> list[Any]:
    """Values for a test: the first in every run, the others where slow tests run."""
    return [
        value if index < keep else pytest.param(value, marks=pytest.mark.slow) for index, value in enumerate(values)
    ]


@dataclass
class Run:
    """A model, prepared, shown its inputs, and converted both ways."""

    model: nn.Module
    inputs: tuple[Any, ...]
    prepared: Any
    quantized: Any
    reference: Any

    @property
    def taken(self) -> list[str]:
        """The ops that are quantized, in order."""
        return [row.op for row in self.prepared.coverage().rows if row.verdict.value != "float"]

    @property
    def left(self) -> list[str]:
        """The ops that stay float, in order."""
        return [row.op for row in self.prepared.coverage().rows if row.verdict.value == "float"]

    @property
    def kernels(self) -> list[str]:
        """The ops that kernels run, beside those that round."""
        return [row.op for row in self.quantized.placed if row.kernel and "quantize_per" not in row.op]

    @property
    def observers(self) -> list[Any]:
        """The observers in the graph, one for each time that it is called."""
        targets = [str(node.target) for node in self.prepared.graph.nodes if node.op == "call_module"]
        return [self.prepared.get_submodule(name) for name in targets if name.startswith(OBSERVER)]

    def count(self, what: str) -> int:
        """How often an op stands in the Q/DQ form."""
        return sum(what in str(node.target) for node in self.reference.graph.nodes)

    def outputs(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        made = [m(*copy.deepcopy(self.inputs)) for m in (self.model, self.reference, self.quantized)]
        return tuple([x for x in pytree.tree_leaves(each) if isinstance(x, Tensor)] for each in made)  # type: ignore[return-value]

    def check(self, share: float = 0.06) -> Run:
        """Results are near the model's, by a share of their range, and kernels near the reference."""
        for expected, reference, found in zip(*self.outputs(), strict=True):
            spread = float(expected.max().clamp(min=0) - expected.min().clamp(max=0)) + 1e-3
            assert found.shape == expected.shape
            assert float((found - expected).abs().max()) <= share * spread + 0.01
            assert float((found - reference).abs().max()) <= 0.5 * share * spread + 0.01
        return self


def run(model: nn.Module, mapping: Any, *inputs: Any, qat: bool = False, convert: Any = None, **options: Any) -> Run:
    """Prepare, show the inputs, convert."""
    prepare = prepare_qat_fx if qat else prepare_fx
    prepared = prepare(model.train() if qat else model.eval(), mapping, copy.deepcopy(inputs), **options)
    prepared(*copy.deepcopy(inputs))
    prepared.eval()
    model.eval()
    quantized = convert_fx(prepared, convert)
    return Run(model, inputs, prepared, quantized, convert_to_reference_fx(prepared, convert))


def torchs(model: nn.Module, mapping: Any, *inputs: Any, **options: Any) -> Any:
    """What torch's own flow gives for the same inputs."""
    prepared = upstream.prepare_fx(copy.deepcopy(model).eval(), mapping, inputs, **options)
    prepared(*inputs)
    return upstream.convert_fx(prepared)(*inputs)


def agrees(model: nn.Module, *inputs: Any, mapping: Any = None, steps: float = 1.01) -> Run:
    """Run the flow, and compare with torch's: within a step, where both are off the model by about as much."""
    mapping = ao.get_default_qconfig_mapping("x86") if mapping is None else mapping
    found = run(model, mapping, *inputs)
    theirs, ours = torchs(model, mapping, *inputs), found.quantized(*inputs)
    scale = max((float(each.calculate_qparams()[0].max()) for each in found.observers), default=0.0)
    assert float((ours - theirs).abs().max()) <= steps * scale
    return found


def called(model: nn.Module) -> Counter[str]:
    """How often a graph calls each op or module."""
    graph: Any = model.graph
    return Counter(str(node.target) for node in graph.nodes if node.op.startswith("call"))
