"""Lowered modules among the rest of torch: compiled, exported, copied, in threads and processes; what they refuse."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.backends.x86 import X86
from quantc.errors import InputError, ModeError
from quantc.ir.program import Program
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.lowered import Lowered


class Net(nn.Module):
    """Convolutions, a sum that can be written over, floats between products, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
        )
        self.last, self.norm = nn.Linear(8 * 6 * 6, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).relu()
        x = torch.relu(x + self.third(self.second(x).relu()))
        return self.norm(nn.functional.gelu(self.last(x.flatten(1)))), x


def image(batch: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


BATCH = {"x": {0: torch.export.Dim("batch", min=0, max=32)}}


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def static() -> Program:
    return qc.quantize(net(), (image(4),), [(image(4, seed),) for seed in range(2)], dynamic_shapes=BATCH).program


@pytest.fixture(scope="module")
def dynamic() -> Program:
    named = qc.QuantConfig().set(nn.Conv2d, X86.modes["dynamic"])
    return qc.quantize(net(), (image(4),), mode="dynamic", config=named, dynamic_shapes=BATCH).program


@pytest.fixture(params=["static", "dynamic"])
def program(request: pytest.FixtureRequest) -> Program:
    found: Program = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def lowered(program: Program) -> Lowered:
    return qc.lower(program, "x86")


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


# -- torch.export, torch.compile -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True], ids=["before a call", "after a call"])
def test_exports_as_the_portable_program(lowered: Lowered, first: bool) -> None:
    x = image(4)
    if first:
        lowered(x)
    exported = torch.export.export(lowered, (x,), dynamic_shapes={"args": ({0: torch.export.Dim("batch", max=32)},)})
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for batch in (4, 7):
        assert same(loaded.module()(image(batch)), lowered.program(image(batch)))
    called = {node.target for node in exported.graph.nodes if node.op == "call_function"}
    assert not [target for target in called if "run_" in str(target) or "onednn" in str(target)]
    weights = [
        value for value in exported.constants.values() if isinstance(value, Tensor) and value.dtype is torch.int8
    ]
    assert sorted(weight.numel() for weight in weights) == [64, 216, 576, 8 * 36 * 16]
    assert not exported.state_dict, "nothing is taken along twice"


def test_strict_export_says_what_to_do(lowered: Lowered) -> None:
    with pytest.raises(Exception, match=r"strict=False; or export lowered\.program\.module"):
        torch.export.export(lowered, (image(4),), strict=True)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiles_as_one_op(lowered: Lowered, fullgraph: bool) -> None:
    torch._dynamo.reset()
    seen: list[torch.fx.Graph] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(module.graph)
        return module.forward

    made = torch.compile(lowered, fullgraph=fullgraph, backend=keep)
    for batch in (4, 5, 1, 9):
        assert same(made(image(batch)), lowered(image(batch)))
    assert all(any("run_lowered" in str(node.target) for node in graph.nodes) for graph in seen)
    torch._dynamo.reset()


def test_compiles_within_a_model() -> None:
    """Through functionalization and the shapes of its op: `aot_eager` asks for all of that, and compiles nothing."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(3, 8)
    inner = qc.lower(qc.quantize(model, (x,), mode="dynamic").program, "x86")
    whole = nn.Sequential(nn.Tanh(), inner, nn.Softmax(-1))
    with torch.no_grad():
        assert torch.equal(torch.compile(whole, fullgraph=True, backend="aot_eager")(x), whole(x))
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_compiles_it(static: Program) -> None:
    torch._dynamo.reset()
    lowered = qc.lower(static, "x86")
    made = torch.compile(lowered, fullgraph=True)
    for batch in (4, 5):
        assert same(made(image(batch)), lowered(image(batch)))


def test_what_comes_out_of_a_compiled_one_is_its_own(static: Program) -> None:
    """A model may yield what it is given; an op may not."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return x, self.linear(x), x.t()

    x = torch.randn(4, 4)
    lowered = qc.lower(qc.quantize(Both().eval(), (x,), [(x,)]).program, "x86")
    torch._dynamo.reset()
    found = torch.compile(lowered, fullgraph=True, backend="aot_eager")(x)
    assert same(found, lowered(x))
    assert len({tensor.data_ptr() for tensor in (x, *found)}) == 4


# -- compile=True --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_rest_is_compiled_on_request(program: Program) -> None:
    torch._dynamo.reset()
    plain, made = qc.lower(program, "x86"), qc.lower(program, "x86", compile=True)
    assert made.headline == f"{plain.headline}, the rest compiled"
    assert made.to_data()["compiled"]
    for batch in (4, 5, 1, 0):
        for found, expected in zip(made(image(batch)), plain(image(batch)), strict=True):
            assert found.shape == expected.shape
            assert found.stride() == expected.stride()
            if batch:
                assert float((found - expected).norm() / expected.norm()) < 0.02
    with torch.inference_mode():
        made(image(4))
    again = pickle.loads(pickle.dumps(made))  # noqa: S301 - our own bytes
    assert again.is_compiled


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16)), (8, 16)),
        (
            nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.Hardswish(), nn.Conv2d(4, 4, 1)),
            (2, 4, 6, 6),
        ),
    ],
    ids=["linear", "conv"],
)
def test_kernels_that_round_for_themselves_are_not_taken_for_quantize_ops(model: nn.Module, shape: Any) -> None:
    """Of one size throughout: a layer that is left out would not be seen in a shape."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    found = qc.quantize(model.eval(), (x,), [(x,)]).program
    plain, made = qc.lower(found, "x86"), qc.lower(found, "x86", compile=True)
    assert float((made(x) - plain(x)).norm() / plain(x).norm()) < 0.02


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    code = """
import torch, quantc as qc
program = qc.quantize(torch.nn.Linear(4, 4).eval(), (torch.zeros(2, 4),), mode="dynamic").program
try:
    qc.lower(program, "x86", compile=True)
except qc.errors.MissingDependencyError as error:
    print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "there is no C++ compiler" in found.stdout
    assert "or lower without compile=True" in found.stdout


# -- copies and state ----------------------------------------------------------------------------------------------------


def test_copies_pickles_and_states_give_the_same(lowered: Lowered) -> None:
    x = image(4)
    expected = lowered(x)
    for twin in (copy.deepcopy(lowered), pickle.loads(pickle.dumps(lowered))):  # noqa: S301 - our own bytes
        assert twin.choices == lowered.choices
        assert same(twin(x), expected)
        twin.load_state_dict(lowered.state_dict())
        assert same(twin(x), expected)
    assert lowered.to("cpu") is lowered
    assert lowered.cpu().float().eval() is lowered
    assert same(lowered(x), expected)


def test_states_of_others_are_refused(lowered: Lowered) -> None:
    state = lowered.state_dict()
    name = next(name for name in state if name.endswith("weight"))
    with pytest.raises(RuntimeError, match="Missing key"):
        lowered.load_state_dict({key: value for key, value in state.items() if key != name})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        lowered.load_state_dict(state | {"other": torch.zeros(1)})
    assert isinstance(
        nn.Sequential(lowered).load_state_dict({f"0.{key}": value for key, value in state.items()}), tuple
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("meta"),
        lambda m: m.train(),
        lambda m: m.requires_grad_(),
    ],
    ids=["half", "double", "meta", "train", "requires_grad_"],
)
def test_it_stays_what_it_is(lowered: Lowered, change: Callable[[Lowered], object]) -> None:
    x = image(4)
    expected = lowered(x)
    with pytest.raises(ModeError):
        change(lowered)
    assert same(lowered(x), expected)


# -- modes, threads, processes -------------------------------------------------------------------------------------------


def test_packing_in_inference_mode_poisons_nothing(lowered: Lowered) -> None:
    x = image(4)
    with torch.inference_mode():
        expected = lowered(x)
    assert same(lowered(x), expected)
    with torch.no_grad():
        assert same(lowered(x), expected)
    assert not any(value.is_inference() for value in lowered.state_dict().values())
    assert not any(value.is_inference() for value in lowered.program.root.state_dict().values())
    lowered.load_state_dict(lowered.state_dict())  # writes into tensors
    assert same(lowered(x), expected)


def test_threads_pack_once(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    made, count, batches = qc.lower(program, "x86"), 8, 3
    packed: list[Kernel] = []

    def watch(kernel: Kernel) -> None:
        pack = kernel.pack

        def noted() -> Any:
            packed.append(kernel)
            return pack()

        monkeypatch.setattr(kernel, "pack", noted)

    for kernel in made.modules():
        if isinstance(kernel, Kernel):
            watch(kernel)
    barrier = threading.Barrier(count)
    found: dict[int, Any] = {}

    def run(index: int) -> None:
        barrier.wait()
        for _ in range(batches):
            found[index] = made(image(1 + index % 3, seed=index))
            assert made.program.root is not None  # while others pack

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packed) == len(set(packed))
    for index in range(count):
        assert same(found[index], made(image(1 + index % 3, seed=index)))


def test_runs_in_a_forked_process(lowered: Lowered) -> None:
    x = image(4)
    expected = lowered(x)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"same" if same(lowered(x), expected) else b"else")
        os._exit(0)
    os.close(write)
    assert os.read(read, 4) == b"same"
    assert os.waitpid(child, 0)[1] == 0


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "what"),
    [
        (image(4).double(), "is f64.*captured for f32"),
        (image(4).half(), "is f16.*captured for f32"),
        (image(4)[:, :2], "size 2 in dimension 1"),
        (image(4)[0], "captured for f32"),
        (image(33), "outside the captured range"),
        (image(4).to("meta"), "is on meta, and the kernels run on the CPU"),
        (image(4).requires_grad_(), "requires a gradient, and kernels have none"),
        (None, "is a NoneType, not a tensor"),
    ],
    ids=["double", "half", "channels", "rank", "batch", "device", "gradient", "none"],
)
def test_inputs_that_do_not_fit_are_refused(lowered: Lowered, x: Any, what: str) -> None:
    for _ in range(2):
        with pytest.raises(InputError, match=what):
            lowered(x)
        lowered(image(4))


def test_gradients_are_not_asked_for_where_none_are_recorded(lowered: Lowered) -> None:
    x = image(4).requires_grad_()
    with torch.no_grad():
        expected = lowered(x)
    assert same(expected, lowered(x.detach()))
    assert not any(tensor.requires_grad for tensor in lowered(image(4)))


def test_another_batch_than_captured_says_how_to_capture_it() -> None:
    x = torch.randn(1, 8)
    fixed = qc.quantize(nn.Linear(8, 4).eval(), (x,), mode="dynamic", dynamic_shapes=None).program
    made = qc.lower(fixed, "x86")
    with pytest.raises(InputError, match=r"has size 5 in dimension 0") as error:
        made(torch.randn(5, 8))
    assert "dynamic_shapes=" in str(error.value)


def test_nan_is_refused(static: Program, dynamic: Program) -> None:
    x = image(4)
    x[1, 0, 2, 2] = torch.nan
    for program in (static, dynamic):
        with pytest.raises(InputError, match="input 'x' holds NaN"):
            qc.lower(program, "x86")(x)
    x[1, 0, 2, 2], x[1, 0, 3, 3] = torch.inf, -torch.inf
    for program in (static, dynamic):
        with pytest.raises(InputError, match="input 'x' holds infinity"):
            qc.lower(program, "x86")(x)


def test_empty_batches_give_empty_results(lowered: Lowered) -> None:
    assert [tuple(tensor.shape) for tensor in lowered(image(0))] == [(0, 16), (0, 8, 6, 6)]
    assert lowered(image(2))[0].shape == (2, 16)


def test_how_inputs_lie_in_memory_does_not_matter(lowered: Lowered) -> None:
    x = image(4)
    expected = lowered(x)
    assert same(lowered(x.contiguous(memory_format=torch.channels_last)), expected)
    assert same(lowered(x.transpose(2, 3).contiguous().transpose(2, 3)), expected)
    assert same(lowered(image(8)[::2]), lowered(image(8)[::2].contiguous()))


# -- memory --------------------------------------------------------------------------------------------------------------


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_weights_take_less_than_a_third_of_float(mode: Any) -> None:
    model, x = layers(), torch.randn(4, 256)
    result = qc.quantize(model, (x,), None if mode == "dynamic" else [(x,)], mode=mode)
    lowered = qc.lower(result.program, "x86")
    in_float = sum(parameter.nbytes for parameter in model.parameters())
    before = lowered.memory()
    assert before.packed == 0
    assert before.in_float == in_float
    lowered(x)
    after = lowered.memory()
    assert after.packed >= 2 * 256 * 512
    assert after.held <= 0.3 * in_float
    assert lowered.to_data()["memory"] == {"plain": after.plain, "packed": after.packed, "in_float": in_float}
    assert str(after) in str(lowered)
