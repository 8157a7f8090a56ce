"""Saved statistics: exact, whole or not at all, and no file, however damaged, does more than raise a LoadError."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quantc.errors import LoadError
from quantc.files import sealed_tensors
from quantc.files.sealed_tensors import FileKind
from quantc.observe import Statistics, start
from quantc.observe.store import DOCUMENT, STATISTICS, VERSION
from quantc.spec.formats import PerChannel
from quantc.spec.spec import INT8

SPECS = [
    INT8,
    INT8.but(observe="mse"),
    INT8.but(observe="mse", granularity=PerChannel(axis=0)),
    INT8.but(observe="moving-average{rate=0.5}"),
    INT8.but(observe="recording"),
    INT8.but(observe="none"),
    INT8.but(observe="fixed{scale=0.5}"),
]


def statistics() -> Statistics:
    generator = torch.Generator().manual_seed(0)
    sites = {}
    for index, spec in enumerate(SPECS):
        observation = start(spec)
        observation.update(torch.randn(3, 5, generator=generator))
        sites[f"node_{index}:out0"] = observation
    return Statistics(sites, {"batches": 1})


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The document of a file, and its other tensors."""
    tensors = sealed_tensors.read(path, STATISTICS)
    return json.loads(tensors.pop(DOCUMENT).numpy().tobytes()), tensors


def write(
    path: Path, document: object, tensors: dict[str, Tensor], kind: FileKind = STATISTICS, version: int = VERSION
) -> None:
    """A file with digests that agree, whatever it holds."""
    text = torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8)
    sealed_tensors.write(path, kind, {DOCUMENT: text, **tensors}, version)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "statistics.safetensors"
    statistics().save(path)
    return path


def test_what_is_saved_is_loaded(saved: Path) -> None:
    before, after = statistics(), Statistics.load(saved)
    assert after.notes == {"batches": 1}
    assert list(after.sites) == sorted(before.sites)
    for name, observation in before.sites.items():
        left, right = observation.to_state(), after.sites[name].to_state()
        assert left.values == right.values
        assert left.tensors.keys() == right.tensors.keys()
        assert all(torch.equal(left.tensors[key], right.tensors[key]) for key in left.tensors)


def test_what_is_empty_can_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    Statistics({f"n{index}": start(spec) for index, spec in enumerate(SPECS)}).save(path)
    assert all(observation.seen == 0 for observation in Statistics.load(path).sites.values())


def test_the_same_statistics_are_the_same_file(saved: Path, tmp_path: Path) -> None:
    statistics().save(tmp_path / "again.safetensors")
    assert saved.read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_a_histogram_is_small_on_disk(tmp_path: Path) -> None:
    observation = start(INT8.but(observe="mse"))
    observation.update(torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)))
    Statistics({"x:out0": observation}).save(tmp_path / "s.safetensors")
    assert (tmp_path / "s.safetensors").stat().st_size < 60_000


def test_an_interruption_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def interrupted(file: BinaryIO, parts: object) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(sealed_tensors, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        statistics().save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


Damage = Callable[[dict[str, Any], dict[str, Tensor]], object]
FAULTS: list[tuple[str, Damage]] = [
    ("extra", lambda header, _: header.update(extra=1)),
    ("sites.node_0:out0.values", lambda header, _: header["sites"]["node_0:out0"].pop("values")),
    ("share", lambda header, _: header["sites"]["node_0:out0"].update(share={"kind": "per-row"})),
    ("unknown observation 'mnmax'", lambda header, _: header["sites"]["node_0:out0"].update(statistics="mnmax")),
    ("the field 'seen' is -1", lambda header, _: header["sites"]["node_0:out0"]["values"].update(seen=-1)),
    ("the field 'seen' is True", lambda header, _: header["sites"]["node_0:out0"]["values"].update(seen=True)),
    ("the tensor 'low' is missing", lambda _, tensors: tensors.pop("node_0:out0|low")),
    ("belongs to no site", lambda _, tensors: tensors.update(stray=torch.ones(1))),
    (
        "'low' is torch.float64",
        lambda _, tensors: tensors.update({"node_0:out0|low": torch.ones((), dtype=torch.float64)}),
    ),
    ("'high' is torch.float32[2]", lambda _, tensors: tensors.update({"node_0:out0|high": torch.ones(2)})),
    ("contains NaN", lambda _, tensors: tensors.update({"node_0:out0|low": torch.tensor(float("nan"))})),
    ("'columns' is not an ascending list", lambda _, tensors: tensors["node_1:out0|columns"].fill_(3)),
    ("'columns' is not an ascending list", lambda _, tensors: tensors["node_1:out0|columns"].add_(1 << 15)),
    ("'counts' does not count", lambda _, tensors: tensors["node_1:out0|counts"].add_(1)),
    ("'counts' does not count", lambda _, tensors: tensors["node_1:out0|counts"].neg_()),
    (
        "contradicts the field 'non_finite'",
        lambda header, _: header["sites"]["node_1:out0"]["values"].update(non_finite=1),
    ),
    ("the field 'rate' is 'fast'", lambda header, _: header["sites"]["node_3:out0"]["values"].update(rate="fast")),
    ("the field 'rate' is 0.0", lambda header, _: header["sites"]["node_3:out0"]["values"].update(rate=0)),
    ("the field 'records' is 2", lambda header, _: header["sites"]["node_4:out0"]["values"].update(records=2)),
    ("the field 'seen' is None", lambda header, _: header["sites"]["node_5:out0"]["values"].pop("seen")),
    ("the field scale", lambda header, _: header["sites"]["node_6:out0"]["values"].update(scale=-1)),
    ("the field zero_point", lambda header, _: header["sites"]["node_6:out0"]["values"].update(zero_point=0.5)),
]


@pytest.mark.parametrize(("told", "damage"), FAULTS, ids=[told for told, _ in FAULTS])
def test_a_malformed_file_is_refused_and_the_field_named(told: str, damage: Damage, saved: Path) -> None:
    header, tensors = read(saved)
    damage(header, tensors)
    write(saved, header, tensors)
    with pytest.raises(LoadError) as caught:
        Statistics.load(saved)
    assert told in str(caught.value)
    assert caught.value.advice


@pytest.mark.parametrize(
    ("told", "label", "version"), [("the field 'format' is 'other'", "other", VERSION), ("'version' is 9", None, 9)]
)
def test_files_of_another_kind_are_refused(told: str, label: str | None, version: int, saved: Path) -> None:
    kind = STATISTICS if label is None else replace(STATISTICS, format=label)
    write(saved, *read(saved), kind, version)
    with pytest.raises(LoadError, match=told):
        Statistics.load(saved)


def test_files_of_earlier_versions_have_no_digests_and_are_refused(saved: Path) -> None:
    document, tensors = read(saved)
    label = json.dumps({"format": "quantc.statistics", "version": 1, **document})
    save_file(tensors, saved, metadata={"quantc": label})
    with pytest.raises(LoadError, match="written by an earlier quantc, without digests") as caught:
        Statistics.load(saved)
    assert "calibrate again" in str(caught.value.advice)


def test_other_files_are_refused(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(LoadError, match="no such file"):
        Statistics.load(tmp_path / "missing.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(LoadError, match="not a safetensors file"):
        Statistics.load(tmp_path / "text.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(LoadError, match="no field 'quantc'"):
        Statistics.load(tmp_path / "weights.safetensors")
    whole = saved.read_bytes()
    for length in range(0, len(whole), 97):
        saved.write_bytes(whole[:length])
        with pytest.raises(LoadError):
            Statistics.load(saved)


def test_random_damage_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    chance = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] ^= chance.randint(1, 255)
        saved.write_bytes(damaged)
        with pytest.raises(LoadError):
            Statistics.load(saved)
        with pytest.raises(LoadError):
            Statistics.from_bytes(bytes(damaged))
