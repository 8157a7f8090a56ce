"""Attributes of traced tensors: `x.shape`, `x.dtype`, `x.T` and the like."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.proxy import Attribute

from quantc.capture.symbolic.proxies import ProxyValue, ValueTracer
from quantc.capture.symbolic.python_spellings import ArgumentKind
from quantc.ir.dialect import aten

FACTS = frozenset({"dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "itemsize"})
"""Properties that become a node when the tensor's type is not known."""
KINDS = {"ndim": ArgumentKind.NUMBER, "itemsize": ArgumentKind.NUMBER, "dtype": ArgumentKind.DTYPE}
TRANSPOSES = {"T": aten.numpy_T.default, "mT": aten.mT.default, "H": aten.matrix_H.default, "mH": aten.mH.default}
PARTS = {"real": aten.real.default, "imag": aten.imag.default, "data": aten.detach.default}


def tensor_attribute(tracer: ValueTracer, x: ProxyValue, name: str) -> Any:
    fake = x.fake if x.fake is not None else tracer.state.real(x.node)
    if name == "shape":
        return shape_of(tracer, x)
    if name in TRANSPOSES:
        return tracer.call(TRANSPOSES[name], (x,))
    if name in PARTS:
        return tracer.call(PARTS[name], (x,))
    if name == "requires_grad":
        return False
    if name in ("is_nested", "is_sparse", "is_quantized") and not isinstance(fake, torch.Tensor):
        return False
    if isinstance(fake, torch.Tensor) and not callable(fact := getattr(fake, name)):
        return fact
    if name == "device":
        return tracer.state.device  # of an input without example: where the model is
    if name in FACTS:
        node = tracer.create_node("call_function", getattr, (x.node, name), {})
        tracer.kinds[node] = KINDS.get(name, ArgumentKind.ANYTHING)
        return tracer.proxy(node)
    if not hasattr(torch.Tensor, name):
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")
    return Attribute(x, name)


def shape_of(tracer: ValueTracer, x: ProxyValue) -> Any:
    """Numbers where sizes are static; nodes for dynamic ones; one node for the whole shape if the rank is unknown."""
    fake = x.fake if x.fake is not None else tracer.state.real(x.node)
    if isinstance(fake, torch.Tensor):
        sizes = [
            size if type(size) is int else tracer.size(aten.sym_size.int, (x, dim), size)
            for dim, size in enumerate(fake.shape)
        ]
        return torch.Size(sizes) if all(type(size) is int for size in sizes) else tuple(sizes)
    node = tracer.create_node("call_function", getattr, (x.node, "shape"), {})
    tracer.kinds[node] = ArgumentKind.SHAPE
    return tracer.proxy(node)
