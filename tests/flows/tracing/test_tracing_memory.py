"""Every way to get at the memory of a tensor that the tracing flow hands on: what is written there counts, or is refused by name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.errors import CaptureError, InputError
from quantc.flows.tracing import UnseenOpError, convert, prepare, to_program
from tests.support.traced_runs import sqnr

TORCH: Any = torch
ARRAYS: Any = np
Write = Callable[[Any], Any]


class Between(nn.Module):
    """Two convolutions, and code of a test between them. With a norm, the code sees what lies inside of a fused op."""

    def __init__(self, write: Write, norm: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.write, self.is_on = write, True

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        if self.is_on:
            given = self.write(y)
            y = y if given is None else given
        return self.second(self.norm(y))


def batch() -> Tensor:
    return torch.randn(4, 4, 6, 6)


def done(made: Any) -> None:
    """Drop what a write gives."""


def numpy_array(y: Tensor) -> None:
    y.numpy()[...] += 3


def memory_of(y: Tensor) -> Tensor:
    storage = y.untyped_storage()
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return torch.frombuffer(raw, dtype=torch.float32)


def pointer(y: Tensor) -> None:
    raw = (ctypes.c_float * y.numel()).from_address(y.data_ptr())
    for index in range(y.numel()):
        raw[index] += 3


def on_storage(y: Tensor) -> None:
    made: Any = torch.tensor([])
    made.set_(y.untyped_storage(), 0, (y.numel(),)).add_(3)


def set_data(y: Tensor) -> None:
    y.data = y.data + 3


def part(y: Tensor) -> None:
    first, _ = y.chunk(2, 1)
    first.add_(3)


def turn(y: Tensor) -> None:
    for row in y:
        row.add_(3)


def set_items(y: Tensor) -> None:
    y[:, 1:] = y[:, 1:] + 3


def view_that_is_kept(y: Tensor) -> Tensor:
    view = y.view(-1)
    y.add_(3)
    return view.view(y.shape)


def detached_that_is_kept(y: Tensor) -> Tensor:
    detached = y.detach()
    y.mul_(2)
    return y + detached


def array_that_is_kept(y: Tensor) -> None:
    array = y.numpy()
    y.add_(1)
    array += 2


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        y.add_(3)
        ctx.mark_dirty(y)
        return y


WRITES: dict[str, Write] = {
    "detach": lambda y: done(y.detach().add_(3)),
    "detach of a detached": lambda y: done(y.detach().detach()[0].add_(3)),
    "numpy": numpy_array,
    "numpy of a detached": lambda y: numpy_array(y.detach()),
    "__array__": lambda y: done(ARRAYS.asarray(y).__iadd__(3)),
    "numpy's dlpack": lambda y: done(ARRAYS.from_dlpack(y).__iadd__(3)),
    "torch's dlpack": lambda y: done(TORCH.from_dlpack(y).add_(3)),
    "from_numpy": lambda y: done(torch.from_numpy(y.numpy()).add_(3)),
    "as_tensor": lambda y: done(torch.as_tensor(y).add_(3)),
    "data": lambda y: done(y.data.add_(3)),
    "data that is set": set_data,
    "untyped_storage": on_storage,
    "address of the storage": lambda y: done(memory_of(y).add_(3)),
    "data_ptr": pointer,
    "out": lambda y: done(torch.add(y, 3, out=y)),
    "out of a view": lambda y: done(torch.add(y.clone().view(-1), 3, out=y.view(-1))),
    "out, of a detached": lambda y: done(torch.add(y.clone(), 3, out=y.detach())),
    "in place": lambda y: done(y.add_(3)),
    "items": set_items,
    "copy_": lambda y: done(y.copy_(y + 3)),
    "set_": lambda y: done(y.set_((y + 3).contiguous())),
    "resize_": lambda y: done(y.resize_(y.shape).add_(3)),
    "view": lambda y: done(y.view(-1).add_(3)),
    "view of a view": lambda y: done(y.view(-1)[:].view(y.shape).add_(3)),
    "slice": lambda y: done(y[:, 1:].add_(3)),
    "transpose": lambda y: done(y.transpose(0, 1).add_(3)),
    "as_strided": lambda y: done(y.as_strided((y.numel(),), (1,)).add_(3)),
    "chunk": part,
    "iteration": turn,
    "contiguous": lambda y: done(y.contiguous().add_(3)),
    "to": lambda y: done(y.to(torch.float32).add_(3)),
    "as_subclass": lambda y: done(y.as_subclass(Tensor).add_(3)),
    "alias": lambda y: done(torch.ops.aten.alias(y).add_(3)),
    "an op of torch.ops": lambda y: done(torch.ops.aten.add_.Scalar(y, 3)),
    "foreach": lambda y: done(TORCH._foreach_add_([y], 3)),
    "nn.init": lambda y: done(nn.init.constant_(y, 0.5)),
    "relu of a detached": lambda y: done(F.relu(y.detach(), inplace=True)),
    "module on a view": lambda y: done(nn.ReLU(inplace=True)(y.view(-1))),
    "a view that is kept": view_that_is_kept,
    "a detached tensor that is kept": detached_that_is_kept,
    "an array that is kept": array_that_is_kept,
    "custom autograd function": Dirty.apply,
    "not the tensor but a copy": lambda y: done(y.clone().add_(3)),
    "storage that is filled": lambda y: done(y.untyped_storage().fill_(0)),
}


WRITTEN = [
    pytest.param(how, norm, seen, marks=() if index % 2 == (seen == bool(norm)) else pytest.mark.slow)
    for index, how in enumerate(WRITES)
    for norm in ("", "inside of a fused op")
    for seen in (True, False)
]
"""Each write in two of the four ways at once, which differ in both; the other two are slow."""


@pytest.mark.parametrize(("how", "norm", "seen"), WRITTEN)
def test_what_is_written_to_memory_counts(how: str, norm: str, seen: bool) -> None:
    torch.manual_seed(0)
    model = Between(WRITES[how], norm).eval()
    model.is_on = seen
    prepared: Any = prepare(model, batch())
    model.is_on = prepared.is_on = True
    with torch.no_grad():
        for _ in range(3):
            x = batch()
            assert sqnr(model(x.clone()), prepared(x.clone())) > 80
        quantized = convert(prepared)
        for _ in range(4):  # at once, step by step, recorded
            x = batch()
            assert sqnr(model(x.clone()), quantized(x.clone())) > 22


def both(model: nn.Module, *inputs: Tensor, above: float = 22) -> nn.Module:
    """Prepare and convert a model, and hold both to it, time after time."""
    model = model.eval()
    prepared = prepare(model, tuple(x.clone() for x in inputs))
    with torch.no_grad():
        for _ in range(3):
            rows = [torch.randn_like(x) for x in inputs]
            assert sqnr(model(*(x.clone() for x in rows)), prepared(*(x.clone() for x in rows))) > 80
        quantized = convert(prepared)
        for _ in range(4):
            rows = [torch.randn_like(x) for x in inputs]
            assert sqnr(model(*(x.clone() for x in rows)), quantized(*(x.clone() for x in rows))) > above
    return quantized


@pytest.mark.parametrize("how", ["in place", "numpy", "data", "view"])
def test_inputs_that_are_written_to_between_two_reads(how: str) -> None:
    ways: dict[str, Write] = {
        "in place": lambda x: x.mul_(3),
        "numpy": lambda x: x.numpy().__imul__(3),
        "data": lambda x: x.data.mul_(3),
        "view": lambda x: x.view(-1).mul_(3),
    }

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)
            self.is_on = False

        def forward(self, x: Tensor) -> Any:
            total = 0
            for _ in range(2):
                total = total + self.conv(x)
                if self.is_on:
                    ways[how](x)
            return total

    torch.manual_seed(0)
    model = Reads().eval()
    prepared: Any = prepare(model, batch())
    model.is_on = prepared.is_on = True
    with torch.no_grad():
        for _ in range(3):
            x = batch()
            assert sqnr(model(x.clone()), prepared(x.clone())) > 80
        quantized = convert(prepared)
        for _ in range(4):
            x = batch()
            assert sqnr(model(x.clone()), quantized(x.clone())) > 22


def test_what_a_fused_op_reads_may_be_written_to_before_its_last_operand_is_there() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            x = F.relu(self.stem(x))
            other = x.clone()
            y = self.conv(x)
            x.zero_()
            return self.head(F.relu(y + other))

    torch.manual_seed(0)
    both(Sum(), batch())


def test_each_call_of_a_fused_op_gives_a_tensor_of_its_own() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            rows = []
            for _ in range(2):
                row = F.relu(y)
                rows.append(row)
                row.mul_(0.5)
            return self.head(rows[0] + rows[1])

    torch.manual_seed(0)
    both(Twice(), batch())


def test_a_call_of_a_fused_op_that_is_left_out_is_refused() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
            self.skips = False
            nn.init.constant_(self.norm.running_mean, 3.0)  # type: ignore[arg-type]

        def forward(self, x: Tensor) -> Any:
            x = self.conv(x)
            if not self.skips:
                x = self.norm(x)
            return self.head(F.relu(x))

    torch.manual_seed(0)
    model = Skips().eval()
    prepared: Any = prepare(model, batch())
    with torch.no_grad():
        prepared(batch())
        twins: tuple[Any, ...] = (prepared, convert(prepared))
        for twin in twins:
            for _ in range(4):
                twin.skips = True
                with pytest.raises(UnseenOpError, match="expected batch_norm"):
                    twin(batch())
                twin.skips, x = False, batch()
                assert sqnr(model(x), twin(x)) > 22


def test_what_lies_inside_of_a_fused_op_is_what_it_was_when_its_input_is_gone() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.seen = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), 0.0
            self.is_on = False

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            if self.is_on:
                x.zero_()
                self.seen = float(y.abs().sum())
            return self.norm(y)

    torch.manual_seed(0)
    model = Looks().eval()
    prepared: Any = prepare(model, batch())
    with torch.no_grad():
        prepared(batch())
        twins: tuple[Any, ...] = (prepared, convert(prepared))
        for twin in twins:
            for _ in range(4):
                x = batch()
                model.is_on = twin.is_on = True
                model(x.clone())
                twin(x.clone())
                assert twin.seen == pytest.approx(model.seen, rel=0.03)
                twin.is_on = False
                twin(x)


def test_the_callers_own_tensor_is_written_to() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            x += self.conv(x)
            return self.head(F.relu(x))

    torch.manual_seed(0)
    model = Adds().eval()
    quantized = both(model, batch())
    with torch.no_grad():
        for _ in range(4):
            x = batch()
            ours, theirs = x.clone(), x.clone()
            model(theirs)
            quantized(ours)
            assert sqnr(theirs, ours) > 30


PAST_TORCH: dict[str, Write] = {
    "the class's own as_subclass": lambda y: Tensor.as_subclass(y, Tensor).add_(3),
    "vmap": torch.vmap(lambda row: row.add_(3)),
}


@pytest.mark.parametrize("how", PAST_TORCH)
def test_code_that_goes_past_torch_is_refused_and_the_model_goes_on(how: str) -> None:
    torch.manual_seed(0)
    model = Between(PAST_TORCH[how]).eval()
    model.is_on = False
    prepared = prepare(model, batch())
    with torch.no_grad():
        prepared(batch())
        quantized: Any = convert(prepared)
        for _ in range(4):
            quantized.is_on = True
            with pytest.raises(InputError, match="goes past torch's functions"):
                quantized(batch())
            quantized.is_on, x = False, batch()
            assert sqnr(model(x), quantized(x)) > 22


def test_a_program_of_what_is_overwritten_is_refused() -> None:
    prepared = prepare(Between(numpy_array).eval(), batch())
    with pytest.raises(CaptureError, match="written to"):
        to_program(prepared)


def test_training_sees_what_was_written_under_another_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.other = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            name = y
            y += self.other(x)
            return F.relu(y) + name

    torch.manual_seed(0)
    model = Named()
    prepared = prepare(model, batch(), qat=True)
    x = batch()
    assert sqnr(model(x), prepared(x)) > 22
    prepared(x).sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())


def write(layer: nn.Conv2d) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def write_past_torch(layer: nn.Conv2d) -> None:
    layer.weight.data.mul_(2)


def replace(layer: nn.Conv2d) -> None:
    layer.weight = nn.Parameter(layer.weight * 2, requires_grad=False)


@pytest.mark.parametrize("change", [write, write_past_torch, replace])
def test_weights_that_change_while_the_model_runs_are_refused(change: Callable[[nn.Conv2d], None]) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.is_on = nn.Conv2d(4, 4, 1), False

        def forward(self, x: Tensor) -> Any:
            if self.is_on:
                change(self.conv)
            return self.conv(x)

    torch.manual_seed(0)
    prepared = prepare(Changes().eval(), batch())
    with torch.no_grad():
        prepared(batch())
        quantized: Any = convert(prepared)
        quantized(batch())
        quantized.is_on = True
        with pytest.raises(InputError, match=r"conv\.weight was written to or replaced"):
            quantized(batch())


def test_buffers_that_nothing_quantized_has_may_change() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.register_buffer("mean", torch.zeros(4, 1, 1))
            self.mean: Tensor

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            self.mean.mul_(0.9).add_(0.1 * y.mean((0, 2, 3)).view(4, 1, 1))
            return self.head(y - self.mean)

    torch.manual_seed(0)
    model, x = Average().eval(), batch()
    prepared: Any = prepare(model, x)
    with torch.no_grad():
        for _ in range(3):
            x = batch()
            assert sqnr(model(x), prepared(x)) > 80
        quantized: Any = convert(prepared)
        for _ in range(4):
            x = batch()
            assert sqnr(model(x), quantized(x)) > 25
    assert sqnr(model.mean, quantized.mean) > 20
