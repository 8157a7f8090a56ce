"""Honest `.pt2` files load as `torch.export.load` loads them: same graph, same bits, same results."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._export.verifier import SpecViolationError
from torch.export import Dim, ExportedProgram, export
from torch.utils import _pytree as pytree

from quantc.capture.pt2.archive import load_exported
from quantc.errors import LoadError
from tests.support.archives import small_program
from tests.zoo import CASES, Case, detached


def both(program: ExportedProgram, folder: Path) -> tuple[ExportedProgram, ExportedProgram]:
    """The program as quantc and as torch load it from one file."""
    file = folder / "program.pt2"
    torch.export.save(program, file)
    return load_exported(file), torch.export.load(file)


def assert_same_tensors(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert type(ours[name]) is type(tensor), name
        assert (ours[name].dtype, ours[name].stride(), ours[name].requires_grad) == (
            tensor.dtype,
            tensor.stride(),
            tensor.requires_grad,
        ), name
        assert torch.equal(bits(ours[name]), bits(tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_program(ours: ExportedProgram, theirs: ExportedProgram) -> None:
    assert str(ours) == str(theirs)
    assert ours.range_constraints == theirs.range_constraints
    assert ours._guards_code == theirs._guards_code
    assert ours.verifiers == theirs.verifiers
    assert ours.call_spec == theirs.call_spec
    assert_same_tensors(ours.state_dict, theirs.state_dict)
    assert_same_tensors(ours.constants, theirs.constants)
    for mine, other in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        for key in ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", "custom"):
            assert mine.meta.get(key) == other.meta.get(key), (mine, key)


def assert_same_outputs(ours: ExportedProgram, theirs: ExportedProgram, *args: Any, **kwargs: Any) -> None:
    mine, other = (program.module()(*detached(args), **detached(kwargs)) for program in (ours, theirs))
    leaves, spec = pytree.tree_flatten(other)
    own_leaves, own_spec = pytree.tree_flatten(mine)
    assert own_spec == spec
    for own, leaf in zip(own_leaves, leaves, strict=True):
        assert torch.equal(bits(own), bits(leaf)) if isinstance(leaf, Tensor) else own == leaf


# A few of the zoo each time, the rest when asked for.
ZOO = [
    pytest.param(case, marks=[pytest.mark.slow] if index % 6 else [], id=case.name) for index, case in enumerate(CASES)
]


@pytest.mark.parametrize("case", ZOO)
def test_zoo(case: Case, tmp_path: Path) -> None:
    args, kwargs = case.example()
    program = export(case.model(), args, kwargs)
    file = tmp_path / "program.pt2"
    try:
        torch.export.save(program, file)
    except NotImplementedError as error:
        pytest.skip(f"torch cannot save it: {error}")
    try:
        theirs = torch.export.load(file)
    except SpecViolationError:
        with pytest.raises(LoadError):
            load_exported(file)
        return
    ours = load_exported(file)
    assert_same_program(ours, theirs)
    args, kwargs = case.example(seed=1)
    assert_same_outputs(ours, theirs, *args, **kwargs)


class Rich(nn.Module):
    """Tied weights, buffers of both kinds, constants, a branch, data-dependent and derived sizes, odd module names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.named = nn.ModuleDict({"my-layer": nn.Linear(4, 4)})
        self.register_buffer("volatile", torch.ones(4), persistent=False)
        self.constant = torch.arange(4.0)

    def forward(self, x: Tensor, extra: dict[str, Tensor], *, mode: str) -> dict[str, Any]:
        y = self.norm(self.second(self.first(x))) + self.volatile + self.constant + self.named["my-layer"](x)
        y = torch.cond(y.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (y,))
        count: Any = extra["count"].item()
        torch._check(count > 2)  # type: ignore[no-untyped-call]
        if extra["q"].shape[0] > 5 and extra["q"].shape[0] % 2 == 0:
            y = y + 1
        return {"y": (y, y.reshape(-1)), "z": torch.zeros(count), "size": x.shape[0] * extra["q"].shape[0] // 2}


def rich_program() -> ExportedProgram:
    shapes = {"x": {0: Dim("batch", min=2, max=100)}, "extra": {"count": None, "q": {0: Dim.AUTO}}, "mode": None}
    args = (torch.randn(4, 4), {"count": torch.tensor(5), "q": torch.randn(6)})
    return export(Rich(), args, {"mode": "a"}, dynamic_shapes=shapes)


def test_rich_program(tmp_path: Path) -> None:
    ours, theirs = both(rich_program(), tmp_path)
    assert_same_program(ours, theirs)
    assert len(ours.range_constraints) == 3
    assert ours._guards_code
    assert any(node.meta["nn_module_stack"] for node in ours.graph.nodes if node.op == "call_function")
    for batch, width in ((2, 6), (9, 8), (100, 20)):
        extra = {"count": torch.tensor(batch + 1), "q": torch.randn(width)}
        assert_same_outputs(ours, theirs, torch.randn(batch, 4), extra, mode="a")
    with pytest.raises(AssertionError, match="Guard failed"):
        ours.module()(torch.randn(4, 4), {"count": torch.tensor(5), "q": torch.randn(7)}, mode="a")


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    ours, _ = both(rich_program(), tmp_path)
    first, second = ours.state_dict["first.weight"], ours.state_dict["second.weight"]
    assert first.data_ptr() == second.data_ptr()
    with torch.no_grad():
        first.add_(1)
    assert torch.equal(first, second)


class Loops(nn.Module):
    def forward(self, x: Tensor) -> tuple[Any, ...]:
        from torch._higher_order_ops import map as each
        from torch._higher_order_ops import scan, while_loop

        carry, rows = scan(lambda carry, row: (carry + row, carry * row), torch.zeros(3), x)
        row_wise: Any = each
        mapped = row_wise(lambda row: row.sin(), x)
        start = (torch.tensor(0), x)
        looped = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * 2), start)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            still = x * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = still @ still.t()
        return carry, rows, mapped, looped, product


class Sizes(nn.Module):
    """Most functions that size expressions can hold."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a, b = x.shape[0], y.shape[0]
        joined = torch.zeros(max(a, b) // 2 + a % 3 + int(a * 0.5) + min(a, 2 * b) + a**2 + (a << 1))
        return joined, torch.ones(int(a / b)), torch.zeros(-(-a // b)), x.nonzero(), torch.cat([x, y])


class Empty(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_loops_and_contexts(tmp_path: Path) -> None:
    ours, theirs = both(export(Loops(), (torch.randn(4, 3),)), tmp_path)
    assert_same_program(ours, theirs)
    assert_same_outputs(ours, theirs, torch.randn(4, 3))


@pytest.mark.parametrize("strict", [True, False])
def test_size_arithmetic(strict: bool, tmp_path: Path) -> None:
    shapes = ({0: Dim.AUTO}, {0: Dim.AUTO})
    program = export(Sizes(), (torch.randn(8, 4), torch.randn(5, 4)), dynamic_shapes=shapes, strict=strict)
    ours, theirs = both(program, tmp_path)
    assert_same_program(ours, theirs)
    assert_same_outputs(ours, theirs, torch.randn(8, 4), torch.randn(5, 4))


def test_derived_sizes(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y[1:]

    batch = Dim("batch", min=3, max=64)
    shapes = ({0: batch}, {0: batch + 1})
    ours, theirs = both(export(Shifted(), (torch.randn(4), torch.randn(5)), dynamic_shapes=shapes), tmp_path)
    assert_same_program(ours, theirs)
    assert len(ours.range_constraints) == 2


def test_decomposed_and_training_programs(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.Dropout(), nn.GELU())
    for program in (export(model.train(), (torch.randn(2, 3, 5, 5),)), rich_program()):
        assert_same_program(*both(program, tmp_path))
        assert_same_program(*both(program.run_decompositions(), tmp_path))


DTYPES = (
    torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32,
)  # fmt: skip


class Assorted(nn.Module):
    """Buffers of every dtype, views of one storage, strided, scalar and empty ones."""

    def __init__(self) -> None:
        super().__init__()
        for index, dtype in enumerate(DTYPES):
            self.register_buffer(f"b{index}", torch.arange(6).to(dtype))
        base = torch.randn(4, 6)
        self.register_buffer("base", base)
        self.register_buffer("row", base[1])
        self.register_buffer("column", base[:, 2])
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("empty", torch.zeros(0, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (
            x + self.get_buffer("scalar"),
            *(buffer.clone() for buffer in self.buffers()),
            self.turned * 2,
            self.frozen * 2,
        )


def test_dtypes_and_layouts(tmp_path: Path) -> None:
    ours, theirs = both(export(Assorted(), (torch.randn(2),)), tmp_path)
    assert_same_program(ours, theirs)
    assert_same_outputs(ours, theirs, torch.randn(2))
    assert ours.state_dict["row"].untyped_storage().data_ptr() == ours.state_dict["base"].untyped_storage().data_ptr()


@dataclass
class Pair:
    left: Tensor
    right: Tensor


class Point(NamedTuple):
    x: Tensor
    y: Tensor


torch.export.register_dataclass(Pair, serialized_type_name="tests.capture.pt2.test_archive.Pair")
pytree._register_namedtuple(Point, serialized_type_name="tests.capture.pt2.test_archive.Point")


class Containers(nn.Module):
    def forward(self, pair: Pair, point: Point, table: OrderedDict[str, Tensor], *rest: Tensor, flag: bool) -> Any:
        total = pair.left + pair.right + point.x * point.y + table["a b"] + sum(rest)
        lists: defaultdict[str, list[Tensor]] = defaultdict(list)
        lists["k"] = [total]
        return Pair(total, total * 2), Point(total, total + 1), OrderedDict(z=total), lists, {1: total}


def container_inputs() -> tuple[Any, ...]:
    x = torch.randn(3)
    return Pair(x, x + 1), Point(x, x * 2), OrderedDict({"a b": x}), x, x


def test_containers(tmp_path: Path) -> None:
    program = export(Containers(), container_inputs(), {"flag": True})
    file = tmp_path / "program.pt2"
    torch.export.save(program, file)
    ours = load_exported(file)
    assert ours.call_spec == program.call_spec
    assert ours.example_inputs is not None
    assert isinstance(ours.example_inputs[0][0], Pair)
    assert_same_outputs(ours, program, *container_inputs(), flag=True)


def test_sample_inputs_are_kept(tmp_path: Path) -> None:
    ours, theirs = both(small_program(), tmp_path)
    for mine, other in zip(*(pytree.tree_leaves(p.example_inputs) for p in (ours, theirs)), strict=True):
        assert torch.equal(mine, other) if isinstance(other, Tensor) else mine == other


def test_program_without_sample_inputs(tmp_path: Path) -> None:
    program = export(Empty(), (torch.randn(3),))
    program.example_inputs = None
    ours, theirs = both(program, tmp_path)
    assert ours.example_inputs is None
    assert_same_outputs(ours, theirs, torch.randn(3))


def test_registered_custom_op(tmp_path: Path) -> None:
    @torch.library.custom_op("quantc_test_archive::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(torch.empty_like)

    class Doubler(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = double(x)
            return result

    ours, theirs = both(export(Doubler(), (torch.randn(3),)), tmp_path)
    assert_same_outputs(ours, theirs, torch.randn(3))


def test_quantized_program(tmp_path: Path) -> None:
    import torch.ao.quantization.fx._decomposed

    class Quantized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ops = torch.ops.quantized_decomposed
            q = ops.quantize_per_tensor(x, 0.1, 3, 0, 255, torch.uint8)
            result: Tensor = ops.dequantize_per_tensor(q, 0.1, 3, 0, 255, torch.uint8)
            return result

    ours, theirs = both(export(Quantized(), (torch.randn(3),)), tmp_path)
    assert_same_outputs(ours, theirs, torch.randn(3))


def test_extra_files_and_other_names(tmp_path: Path) -> None:
    file = tmp_path / "a model.v2.pt2"
    torch.export.save(small_program(), file, extra_files={"notes.txt": "__import__('os')"})
    assert load_exported(str(file)).graph_signature == torch.export.load(file).graph_signature
    assert load_exported(file).module() is not None
