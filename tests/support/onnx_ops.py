"""Functions written in ONNX op by op, run in ONNX Runtime, and held against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.ir.program import Program
from quantc.targets.onnx.onnx_export import Exported, export
from quantc.targets.onnx.op_writers import NoOnnxFormError
from quantc.targets.onnx.profiles import PROFILES
from quantc.targets.onnx.sessions import OnnxRuntime

Cases = dict[str, tuple[Callable[..., Any], tuple[int, ...]]]
"""By name: a function of a tensor, and its shape."""
NEAR = 2e-5


class Function(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class FunctionOfTwo(Function):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return self.function(x, y)


def as_module(function: Callable[..., Any], *inputs: Tensor) -> nn.Module:
    return Function(function) if len(inputs) == 1 else FunctionOfTwo(function)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def program_of(module: nn.Module, *inputs: Tensor, is_open: bool = False) -> Program:
    """A module captured for inference; if `is_open`, for any first size of its one input."""
    sizes = ({0: Dim("batch", min=2, max=32)},) if is_open else None
    return qc.pipelines.inference().run_on_copy(qc.capture(module.eval(), inputs, dynamic_shapes=sizes))


def exported(function: Callable[..., Any], *inputs: Tensor) -> Exported:
    return export(program_of(as_module(function, *inputs), *inputs), PROFILES["onnxruntime"])


def op_types(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The ONNX ops of a function, in order, but for the copies of its outputs."""
    found = [node.op_type for node in exported(function, *inputs).model.graph.node]
    return [kind for kind in found if kind != "Identity"]


def check(module: nn.Module, program: Program, *inputs: Tensor) -> None:
    """ONNX Runtime makes of a program what torch makes of its module."""
    made = export(program, PROFILES["onnxruntime"])
    found = OnnxRuntime(made.model.SerializeToString(), 1)(inputs)
    with torch.no_grad():
        wanted = pytree.tree_leaves(module(*inputs))
    for left, place in zip(wanted, made.outputs, strict=True):
        torch.testing.assert_close(found[place], left, rtol=NEAR, atol=NEAR)


def check_function(function: Callable[..., Any], *inputs: Tensor) -> None:
    module = as_module(function, *inputs)
    check(module, program_of(module, *inputs), *inputs)


def check_case(case: tuple[Callable[..., Any], tuple[int, ...]], *, is_open: bool = True) -> None:
    """A function is what torch has; if its first size is open, for another one too."""
    function, shape = case
    module = Function(function)
    program = program_of(module, drawn(*shape), is_open=is_open)
    check(module, program, drawn(*shape))
    if is_open:
        check(module, program, drawn(7, *shape[1:], seed=1))


def refusal(function: Callable[..., Any], *inputs: Tensor) -> str:
    """Why a function has no ONNX form."""
    with pytest.raises(NoOnnxFormError) as caught:
        exported(function, *inputs)
    return str(caught.value)
