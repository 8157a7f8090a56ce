"""Writes in place in the PT2 export flow: quantizing every tensor on a fine grid leaves what a model computes, what it
returns and what it leaves in its caller's tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.flows.pt2e import (
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    Quantizer,
    convert_pt2e,
    prepare_pt2e,
    prepare_qat_pt2e,
    to_program,
)

FINE = FixedQParamsQuantizationSpec(torch.int32, 2.0**-16, 0, -(2**30), 2**30, torch.per_tensor_affine)


class Everything(Quantizer):
    """Wants every float tensor that an op reads or yields on a fine grid."""

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.nodes:
            if node.op == "call_function" and is_float(node):
                read: Any = {operand: FINE for operand in node.all_input_nodes if is_float(operand)}
                node.meta["quantization_annotation"] = QuantizationAnnotation(read, FINE)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        pass


def is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


class Writing(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.body = body
        self.register_buffer("state", torch.zeros(2, 4))

    def forward(self, x: Tensor, o: Tensor) -> Any:
        return self.body(self, x, o)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda y: y,
    "row": lambda y: y[0],
    "columns": lambda y: y[:, 1:3],
    "view": lambda y: y.view(8),
    "transposed": lambda y: y.t(),
    "chunk": lambda y: y.chunk(2, 1)[1],
    "squeeze": lambda y: y.unsqueeze(0).squeeze(0),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "relu_": lambda v: v.relu_(),
    "add_": lambda v: v.add_(1.5),
    "out": lambda v: torch.mul(v, 2.0, out=v),
    "copy_": lambda v: v.copy_(v.neg()),
    "fill_": lambda v: v.fill_(0.5),
    "item": lambda v: v.__setitem__(0, 3.0),
}


def programs() -> dict[str, Callable[..., Any]]:
    """A write through each view of an activation, of an input and of a buffer, read through another afterwards."""
    found: dict[str, Callable[..., Any]] = {}
    for (w, write), (v, view), (r, read) in itertools.product(WRITES.items(), VIEWS.items(), VIEWS.items()):

        def on_activation(s: Any, x: Tensor, o: Tensor, write: Any = write, view: Any = view, read: Any = read) -> Any:
            y = s.a(x)
            seen = read(y)
            write(view(y))
            return s.b(y), seen + 1.0, y

        def on_input(s: Any, x: Tensor, o: Tensor, write: Any = write, view: Any = view, read: Any = read) -> Any:
            seen = read(o)
            first = s.a(o)
            write(view(o))
            return s.b(o), seen * 2.0, first

        def on_buffer(s: Any, x: Tensor, o: Tensor, write: Any = write, view: Any = view, read: Any = read) -> Any:
            s.state.copy_(x)
            write(view(s.state))
            return s.b(s.state) + s.a(x), read(s.state) + 1.0

        for name, body in (("activation", on_activation), ("input", on_input), ("buffer", on_buffer)):
            found[f"{name}-{w}-{v}-{r}"] = body
    return found


PROGRAMS = programs()
NORMAL = list(PROGRAMS)[::11]


def check(body: Callable[..., Any], prepare: Any) -> None:
    torch.manual_seed(0)
    model: Any = Writing(body).requires_grad_(False).eval()
    x, o = torch.randn(2, 4), torch.randn(2, 4)
    exported: Any = torch.export.export(model, (x, o.clone())).module()
    prepared = prepare(exported, Everything())
    wanted_o = o.clone()
    wanted = model(x, wanted_o)
    state = model.state.clone()
    left = o.clone()
    torch.testing.assert_close(prepared(x, left), wanted, atol=2e-4, rtol=0)
    torch.testing.assert_close(left, wanted_o, atol=2e-4, rtol=0)
    for side in (convert_pt2e(prepared), to_program(convert_pt2e(prepared))):
        left = o.clone()
        torch.testing.assert_close(side(x, left), wanted, atol=2e-4, rtol=0)
        torch.testing.assert_close(left, wanted_o, atol=2e-4, rtol=0)
        buffers = dict(side.named_buffers()) if isinstance(side, nn.Module) else {}
        if "state" in buffers:
            torch.testing.assert_close(buffers["state"], state, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", NORMAL)
def test_what_is_written_stays_written(name: str) -> None:
    check(PROGRAMS[name], prepare_pt2e)


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [prepare_pt2e, prepare_qat_pt2e])
def test_every_write_through_every_view(prepare: Any) -> None:
    for name in PROGRAMS:
        try:
            check(PROGRAMS[name], prepare)
        except Exception as error:
            error.add_note(name)
            raise
    assert len(PROGRAMS) == 3 * 6 * 7 * 7
