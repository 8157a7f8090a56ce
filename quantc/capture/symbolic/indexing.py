"""Lowering of `x[...]` and `x[...] = v` on tensors to the ATen ops that PyTorch itself calls."""

from __future__ import annotations

from typing import Any

import torch

from quantc.capture.refused_trace import RefusedError
from quantc.capture.symbolic.proxies import ProxyValue, ValueTracer
from quantc.capture.symbolic.python_spellings import ArgumentKind
from quantc.ir.dialect import aten

END = 9223372036854775807
"""ATen's value for an open end of a slice."""


def _consumes(part: Any) -> bool:
    return part is not None and part is not Ellipsis and not isinstance(part, bool)


def view_of(tracer: ValueTracer, x: Any, index: Any) -> tuple[Any, list[Any] | None]:
    """Apply the ints, slices, Nones and ellipses of an index; the remaining tensor indices, or None."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, bool) for part in parts):
        raise RefusedError("indexing with a Python bool is not supported; use a tensor mask or None")
    dim, tensors = 0, {}
    for position, part in enumerate(parts):
        if isinstance(part, str):
            raise RefusedError(f"a tensor is indexed with {part!r}; if it is a dict, give example inputs to capture")
        if part is Ellipsis:
            behind = sum(1 for later in parts[position + 1 :] if _consumes(later))
            dim = _from_here(x, parts[position + 1 :], behind)
        elif part is None:
            x = tracer.call(aten.unsqueeze.default, (x, dim))
            dim += 1
        elif isinstance(part, slice):
            x = _slice(tracer, x, dim, part)
            dim += 1
        elif isinstance(part, torch.Tensor | list) or getattr(part, "kind", None) is ArgumentKind.TENSOR:
            tensors[dim] = torch.tensor(part) if isinstance(part, list) else part
            dim += 1
        else:
            x = tracer.call(aten.select.int, (x, dim, part))
    if not tensors:
        return x, None
    return x, [tensors.get(position) for position in range(max(tensors) + 1)]


def _from_here(x: Any, later: list[Any], behind: int) -> int:
    """The dimension behind `...`; counted from the end where the rank is not known, which serves a single index."""
    fake = x.fake if isinstance(x, ProxyValue) else x
    if isinstance(fake, torch.Tensor):
        return fake.dim() - behind
    if not later or (len(later) == 1 and isinstance(later[0], int | slice) and not isinstance(later[0], bool)):
        return -behind
    raise RefusedError("indexing with `...` needs the rank of the tensor; give example inputs to capture")


def _slice(tracer: ValueTracer, x: Any, dim: int, part: slice) -> Any:
    if part.start is None and part.stop is None and part.step is None:
        return x
    step = () if part.step is None else (part.step,)
    if isinstance(part.start, ProxyValue) or isinstance(part.stop, ProxyValue):
        # like PyTorch's slices with symbolic bounds: omitted bounds stay omitted
        return tracer.call(aten.slice.Tensor, (x, dim, part.start, part.stop, *step))
    start = 0 if part.start is None else part.start
    stop = END if part.stop is None else part.stop
    return tracer.call(aten.slice.Tensor, (x, dim, start, stop, *step))


def get_item(tracer: ValueTracer, x: Any, index: Any) -> Any:
    viewed, tensors = view_of(tracer, x, index)
    if tensors is not None:
        return tracer.call(aten.index.Tensor, (viewed, tensors))
    # an index that selects everything still yields a new tensor object that shares memory
    return tracer.call(aten.alias.default, (viewed,)) if viewed is x else viewed


def set_item(tracer: ValueTracer, x: Any, index: Any, value: Any) -> None:
    viewed, tensors = view_of(tracer, x, index)
    is_tensor = isinstance(value, torch.Tensor) or getattr(value, "kind", None) is ArgumentKind.TENSOR
    if tensors is not None:
        put = value if is_tensor else tracer.constant_like(value, x)
        tracer.call(aten.index_put_.default, (viewed, tensors, put))
    elif is_tensor:
        tracer.call(aten.copy_.default, (viewed, value))
    else:
        tracer.call(aten.fill_.Scalar, (viewed, value))
