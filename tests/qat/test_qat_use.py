"""Training as users do it: resumed, frozen, compiled, in other floats, in branches and loops, with any optimizer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import quantc as qc
from quantc.ir.program import Program
from tests.support.control_flow import CASES as CONTROL_FLOW
from tests.support.training import CONFIGS, assert_converts_exactly, batches, net, prepared, trained

OPTIMIZERS: dict[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_any_optimizer_will_do(name: str) -> None:
    program = prepared(config=CONFIGS["learned"])
    optimizer = OPTIMIZERS[name](list(program.parameters()))
    x, y = batches(1)[0]

    def loss() -> float:
        optimizer.zero_grad()
        value = functional.cross_entropy(program(x), y)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    program(x)
    before = copy.deepcopy(program.state_dict())
    for _ in range(2):
        optimizer.step(loss)
    assert not torch.equal(before["conv1.weight"], program.state_dict()["conv1.weight"])
    assert_converts_exactly(program, x)


def steps(program: Program, optimizer: torch.optim.Optimizer, first: int, last: int, run: Any = None) -> list[float]:
    """Train on some of the batches, by calling the program or what was made of it."""
    torch.manual_seed(first)  # of dropout
    losses = []
    for x, y in batches(last)[first:]:
        optimizer.zero_grad()
        loss = functional.cross_entropy((program if run is None else run)(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("config", ["default", "learned"])
def test_a_training_is_resumed_to_the_bit(config: str, tmp_path: Any) -> None:
    def begun() -> tuple[Program, torch.optim.Optimizer]:
        program = prepared(config=CONFIGS[config])
        return program, torch.optim.Adam(program.parameters(), lr=0.01)

    whole, optimizer = begun()
    steps(whole, optimizer, 0, 3)
    qc.qat.freeze_norms(whole)
    torch.save({"program": whole.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    expected = steps(whole, optimizer, 3, 6)
    resumed, optimizer = begun()
    saved = torch.load(tmp_path / "half.pt", weights_only=True)
    resumed.load_state_dict(saved["program"])
    optimizer.load_state_dict(saved["optimizer"])
    assert steps(resumed, optimizer, 3, 6) == expected
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    assert_converts_exactly(resumed, batches(1)[0][0])


def test_clones_train_apart() -> None:
    program = trained(prepared(config=CONFIGS["learned"]), 2)
    twin = program.clone()
    before = copy.deepcopy(twin.state_dict())
    trained(program, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in twin.state_dict().items())
    assert_converts_exactly(twin, batches(1)[0][0])


@pytest.mark.parametrize("config", ["default", "learned"])
def test_autocast(config: str) -> None:
    program = prepared(config=CONFIGS[config])
    optimizer = torch.optim.SGD(program.parameters(), lr=0.05)
    for x, y in batches(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(program(x).float(), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert all(parameter.dtype == torch.float32 for parameter in program.parameters())
    assert_converts_exactly(program, batches(1)[0][0])


def without_dropout() -> Program:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    config = qc.QuantConfig().set_op("linear", qc.UINT8.but(observe="lsq-plus"))
    return qc.prepare(qc.capture(nn.Sequential(*layers).eval(), (batches(1)[0][0],)), "x86", config=config, qat=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training_is_the_same_training(backend: str) -> None:
    plain, compiled = without_dropout(), without_dropout()
    torch.compiler.reset()
    module: Any = torch.compile(compiled.module, backend=backend)
    for program, run in ((plain, plain), (compiled, module)):
        steps(program, torch.optim.SGD(program.parameters(), lr=0.01), 0, 4, run)
    ours, theirs = plain.state_dict(), compiled.state_dict()
    for name in ours:
        assert torch.allclose(ours[name].float(), theirs[name].float(), atol=1e-4), name
    compiled.eval()
    x = batches(1)[0][0]
    with torch.no_grad():
        assert torch.allclose(module(x), compiled(x), atol=1e-4)
    torch.compiler.reset()
    assert_converts_exactly(compiled, x)


@pytest.mark.parametrize("mode", [True, False])
def test_compiles_as_one_graph(mode: bool) -> None:
    program = prepared()
    x = batches(1)[0][0]
    program(x)
    program.train(mode)
    torch.compiler.reset()
    module: Any = torch.compile(program.module, backend="eager", fullgraph=True)
    module(x).sum().backward()
    torch.compiler.reset()


def test_copies_pickles_and_exports_compute_the_same() -> None:
    program = trained(prepared(), 2).eval()
    x = batches(1)[0][0]
    with torch.no_grad():
        expected = program(x)
        assert torch.equal(copy.deepcopy(program.module)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(program.module))(x), expected)  # noqa: S301 - our own bytes
        assert torch.equal(torch.export.export(program.module, (x,)).module()(x), expected)


def test_converting_in_the_middle_changes_nothing() -> None:
    program = trained(prepared(), 2)
    before = copy.deepcopy(program.state_dict())
    qc.convert(program)
    assert program.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in program.state_dict().items())
    trained(program, 2)
    assert_converts_exactly(program, batches(1)[0][0])


@pytest.mark.parametrize("name", list(CONTROL_FLOW))
def test_branches_and_loops_are_trained(name: str) -> None:
    case = CONTROL_FLOW[name]
    program = qc.prepare(qc.capture(case.model(), case.batch(0)), "x86", qat=True)
    before = copy.deepcopy(program.state_dict())
    optimizer = torch.optim.SGD(program.parameters(), lr=0.05)
    for seed in range(1, 13):
        optimizer.zero_grad()
        program(*case.batch(seed)).square().mean().backward()
        optimizer.step()
    after = program.state_dict()
    own = [name for name, parameter in program.named_parameters() if parameter.requires_grad]
    assert all(not torch.equal(before[name], after[name]) for name in own), own
    for seed in (20, 21, 22, 23):
        converted = assert_converts_exactly(program, *case.batch(seed))
    converted.verify()
    assert any(path for path, _ in converted.graphs())  # they are ops again


def test_training_mode_captures_are_taken() -> None:
    model = net().train()
    program = qc.prepare(qc.capture(model, (batches(1)[0][0],)), "x86", qat=True)
    trained(program, 2)
    assert_converts_exactly(program, batches(1)[0][0])


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_attention_keeps_its_dropout(backend: str) -> None:
    """x86 leaves attention whole, QNNPACK takes it apart; either way what is dropped is dropped in training alone."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.4, batch_first=True).train()
    x = torch.randn(3, 5, 16)
    program = qc.prepare(qc.capture(model, (x,)), backend, qat=True)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.01)
    program(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(program(x), program(x))
    program.eval()
    assert torch.equal(program(x), program(x))
    assert_converts_exactly(program, x)
