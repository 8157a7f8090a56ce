"""Functions as modules, and their ONNX form held to torch on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.profiles import PROFILES
from quantc.targets.onnx.sessions import OnnxRuntime


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def check(module: nn.Module, program: qc.Program, x: Tensor) -> None:
    exported = export(program, PROFILES["onnxruntime"])
    found = OnnxRuntime(exported.model.SerializeToString(), 1)([x])
    with torch.no_grad():
        wanted = pytree.tree_leaves(module(x))
    for left, place in zip(wanted, exported.outputs, strict=True):
        torch.testing.assert_close(found[place], left, rtol=2e-5, atol=2e-5)
