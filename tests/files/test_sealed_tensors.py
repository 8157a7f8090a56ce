"""Damage: of every file quantc writes, single bits are flipped. What was damaged is refused, or gives what it gave before."""

from __future__ import annotations

import random
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.calibration.accumulator import Whole
from quantc.calibration.checkpoint import Checkpoint
from quantc.errors import CalibrationError, ConfigError, LoadError, ParseError
from quantc.flows import tracing
from quantc.observe import Statistics
from quantc.targets.executorch.pte_container import HEADER, MAGIC, seal_pte, unseal_pte
from quantc.targets.kernels.tuning import Times
from quantc.text.files import Snapshot, read_text
from tests.support.store_files import calibrated, images, small_model

REFUSED = (LoadError, ConfigError, CalibrationError, ParseError)
WHOLE = 10_000
SLICE = 220
PTE = 40 + 256 * 8


class Case(NamedTuple):
    """A file, what reads it, and what it gave before it was damaged. A reader gives something that compares."""

    path: Path
    read: Callable[[Path], Any]
    weight: int = 1
    """How much of the flips it gets."""


def observed(sites: Any) -> Any:
    """Statistics as plain data."""
    rows = {}
    for name, observation in sites.items():
        state = observation.to_state()
        rows[name] = (dict(state.values), {key: tensor.tolist() for key, tensor in state.tensors.items()})
    return rows


def read_statistics(path: Path) -> Any:
    found = Statistics.load(path)
    return dict(found.notes), observed(found.sites)


def read_checkpoint(path: Path) -> Any:
    found = Checkpoint(path, 2, {"program": "p", "plan": "q"}).read()
    return None if found is None else (observed(found[0].totals), found[0].batches, found[0].samples, found[1])


def read_program(path: Path) -> Any:
    program = qc.load(path)
    return (program if isinstance(program, qc.Program) else program.program).dump(), program(images()).tolist()


def read_dump(path: Path) -> Any:
    program = read_text(path.with_name(f"{path.name.partition('.')[0]}.txt"))
    return program.dump(), [leaf.tolist() for leaf in program.example_inputs or ()], program(images()).tolist()


def read_times(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            return Times(path).read()
        except UserWarning as told:
            raise LoadError(str(told)) from told


def read_pte(path: Path) -> Any:
    """What ExecuTorch reads of it."""
    return unseal_pte(path.read_bytes(), str(path))


def write_all(folder: Path) -> dict[str, Case]:
    """One of everything that quantc writes and reads."""
    prepared = calibrated()
    converted = qc.convert(prepared)
    statistics = Statistics(prepared.plan.statistics, {"batches": 2, "samples": 4, "threads": 1})
    statistics.save(folder / "statistics.safetensors")
    whole = Whole(dict(prepared.plan.statistics), 2, 4)
    Checkpoint(folder / "checkpoint.safetensors", 2, {"program": "p", "plan": "q"}).write(whole)
    for name, program in {
        "captured": qc.capture(small_model(), (images(),)),
        "prepared": prepared,
        "converted": converted,
    }.items():
        program.save(folder / f"{name}.qc")
    qc.lower(converted, "x86").save(folder / "lowered.qc")
    config = qc.QuantConfig().set("conv", qc.FLOAT).set("first", qc.UINT8.but(observe="percentile{percentile=99.9}"))
    config = config.set_node("add", qc.Fixed(0.125, 3, qc.UINT8)).set_all(qc.FLOAT, role="bias")
    config.save(folder / "config.toml")
    config.save(folder / "config.json")
    times = Times(folder / "kernel-times.json", new={f"work {index}": index / 7 for index in range(40)})
    times.write()
    Snapshot.of(converted).write(folder / "dump.txt")
    header = b"\x10\0\0\0" + MAGIC + HEADER + struct.pack("<IQQQ", 32, PTE, 0, 0)
    (folder / "model.pte").write_bytes(seal_pte(header + bytes(range(256)) * 8))
    return {
        "statistics": Case(folder / "statistics.safetensors", read_statistics, 6),
        "checkpoint": Case(folder / "checkpoint.safetensors", read_checkpoint, 6),
        "captured": Case(folder / "captured.qc", read_program),
        "prepared": Case(folder / "prepared.qc", read_program, 2),
        "converted": Case(folder / "converted.qc", read_program, 2),
        "lowered": Case(folder / "lowered.qc", read_program),
        "toml": Case(folder / "config.toml", qc.QuantConfig.load, 4),
        "json": Case(folder / "config.json", qc.QuantConfig.load, 4),
        "times": Case(folder / "kernel-times.json", read_times, 4),
        "dump": Case(folder / "dump.txt", read_dump, 4),
        "constants": Case(folder / "dump.safetensors", read_dump),
        "inputs": Case(folder / "dump.inputs.safetensors", read_dump),
        "pte": Case(folder / "model.pte", read_pte),
    }


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return write_all(tmp_path_factory.mktemp("flips"))


@contextmanager
def flipped(path: Path, chance: random.Random) -> Iterator[str]:
    """One bit of a file the other way round, and back."""
    whole = path.read_bytes()
    place, bit = chance.randrange(len(whole)), chance.randrange(8)
    damaged = bytearray(whole)
    damaged[place] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        yield f"bit {bit} of byte {place} of {len(whole)}"
    finally:
        path.write_bytes(whole)


def outcomes(case: Case, count: int, seed: int) -> Counter[str]:
    """What came of so many flips: refused, the same, or something else."""
    chance = random.Random(seed)
    before = case.read(case.path)
    found: Counter[str] = Counter()
    for _ in range(count):
        with flipped(case.path, chance) as where:
            try:
                after = case.read(case.path)
            except REFUSED:
                found["refused"] += 1
            else:
                found["same" if after == before else f"OTHER: {where}"] += 1
    return found


def share(cases: dict[str, Case], name: str, count: int) -> int:
    return -(-count * cases[name].weight // sum(case.weight for case in cases.values()))


NAMES = (
    ["statistics", "checkpoint", "captured", "prepared", "converted", "lowered", "toml", "json", "times", "dump", "constants", "inputs", "pte"]
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_refused_or_changes_nothing(name: str, cases: dict[str, Case]) -> None:
    assert cases.keys() == set(NAMES)
    found = outcomes(cases[name], share(cases, name, SLICE), seed=0)
    assert set(found) <= {"refused", "same"}, found
    assert found["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_flipped_bits(name: str, cases: dict[str, Case]) -> None:
    found = outcomes(cases[name], share(cases, name, WHOLE), seed=1)
    assert set(found) <= {"refused", "same"}, found
    if name not in ("toml", "json", "times", "dump"):
        assert set(found) == {"refused"}  # every bit of a container counts


def test_binary_files_are_refused_whichever_bit_is_flipped(cases: dict[str, Case]) -> None:
    """All bits of the first bytes, where lengths and labels stand."""
    case = cases["statistics"]
    whole = case.path.read_bytes()
    for place in range(40 * 8):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(LoadError):
            Statistics.from_bytes(bytes(damaged))


def test_what_is_cut_short_is_refused(cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        whole = case.path.read_bytes()
        before = case.read(case.path)
        for end in (0, 1, len(whole) // 2, len(whole) - 1):
            case.path.write_bytes(whole[:end])
            try:
                assert case.read(case.path) == before, (name, end)
            except REFUSED:
                continue
            finally:
                case.path.write_bytes(whole)
            assert end == len(whole) - 1, (name, end)  # the last line break of a text says nothing


def test_a_damaged_state_of_a_traced_model_is_refused() -> None:
    """What a prepared or converted model of the tracing flow has in its state dict beside the tensors of the model."""
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    prepared = tracing.prepare(model, (x,))
    prepared(x)
    chance = random.Random(0)
    for stage in (prepared, tracing.convert(prepared)):
        state = stage.state_dict()
        (name,) = [key for key, value in state.items() if getattr(value, "dtype", None) == torch.uint8]
        whole = state[name]
        for _ in range(25):
            damaged = whole.clone()
            damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
            with pytest.raises(LoadError):
                stage.load_state_dict({**state, name: damaged})
        stage.load_state_dict(state)


def test_a_config_that_was_edited_says_what_to_do(cases: dict[str, Case], tmp_path: Path) -> None:
    text = cases["toml"].path.read_text()
    edited = tmp_path / "config.toml"
    edited.write_text(text.replace('"first"', '"second"'))
    with pytest.raises(ConfigError, match="changed since it was written") as caught:
        qc.QuantConfig.load(edited)
    assert "remove its line 'seal'" in str(caught.value.advice)
    seal, rest = edited.read_text().split("\n", 1)
    assert seal.startswith("seal = ")
    edited.write_text(rest)
    assert "second" in str(qc.QuantConfig.load(edited))
    edited.write_text(f"# a comment of mine\n{text}\n\n")  # says the same: the seal is of the data
    assert qc.QuantConfig.load(edited) == qc.QuantConfig.load(cases["toml"].path)
