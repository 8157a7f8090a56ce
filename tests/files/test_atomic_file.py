"""Faults while files are written: a full disk, a process that is killed, folders that are read-only, threads at one path.

Whatever happens, a file is the old one or the new one, whole; nothing else is left lying about; and errors are quantc's own.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import quantc as qc
from quantc.calibration.accumulator import Whole
from quantc.calibration.checkpoint import Checkpoint
from quantc.errors import QuantcError, SaveError
from quantc.files import atomic_file as writing
from quantc.files.atomic_file import write_text
from quantc.observe import Statistics
from quantc.targets.executorch.artifact import Pte
from quantc.targets.kernels.tuning import Times
from quantc.text.files import Snapshot, read_text
from tests.support.store_files import calibrated, images, small_model


class Writer(NamedTuple):
    """Something that writes a file: `save(path, version)` for two versions of it, and what reads it back."""

    name: str
    save: Callable[[Path, int], object]
    read: Callable[[Path], Any]


def _programs() -> list[qc.Program]:
    return [qc.capture(small_model(), (images(seed),)) for seed in (0, 1)]


def _statistics() -> list[Statistics]:
    prepared = calibrated()
    return [Statistics(prepared.plan.statistics, {"batches": count, "samples": 4, "threads": 1}) for count in (1, 2)]


@pytest.fixture(scope="module")
def writers() -> dict[str, Writer]:
    programs, statistics = _programs(), _statistics()
    converted = qc.convert(calibrated())
    lowered = [qc.lower(converted, target) for target in ("x86", "qnnpack")]
    configs = [qc.QuantConfig().set("a" * 400, qc.FLOAT), qc.QuantConfig().set("b" * 400, qc.FLOAT)]
    identity = {"program": "p"}

    def save_checkpoint(path: Path, version: int) -> None:
        Checkpoint(path, 1, identity).write(Whole(dict(statistics[0].sites), version, 4))

    def save_times(path: Path, version: int) -> None:
        Times(path, new={f"{index}": version + 0.5 for index in range(60)}).write()

    def read_inputs(path: Path) -> Any:
        return [leaf.tolist() for leaf in qc.load(path).example_inputs]

    def read_checkpoint(path: Path) -> Any:
        found = Checkpoint(path, 1, identity).read()
        return None if found is None else found[0].batches

    found = [
        Writer("model.qc", lambda path, version: programs[version].save(path), read_inputs),
        Writer("lowered.qc", lambda path, version: lowered[version].save(path), lambda path: qc.load(path).target),
        Writer(
            "seen.safetensors",
            lambda path, version: statistics[version].save(path),
            lambda path: Statistics.load(path).notes["batches"],
        ),
        Writer("checkpoint.safetensors", save_checkpoint, read_checkpoint),
        Writer("config.toml", lambda path, version: configs[version].save(path), qc.QuantConfig.load),
        Writer("config.json", lambda path, version: configs[version].save(path), qc.QuantConfig.load),
        Writer("times.json", save_times, lambda path: max(Times(path).read().values())),
        Writer("page.html", lambda path, version: write_text(path, f"{version}" * 5000), lambda path: path.read_text()),
        Writer(
            "model.pte",
            lambda path, version: Pte(b"\x10\0\0\0ET12" + bytes([version]) * 5000, None, where="x").save(path),
            lambda path: path.read_bytes(),
        ),
    ]
    return {writer.name: writer for writer in found}


NAMES = (
    "model.qc",
    "lowered.qc",
    "seen.safetensors",
    "checkpoint.safetensors",
    "config.toml",
    "config.json",
    "times.json",
    "page.html",
    "model.pte",
)
by_name = pytest.mark.parametrize("name", NAMES)


def failing(writer: Writer, path: Path, version: int) -> None:
    """It fails as quantc's files do. What was measured is not lost with its file: that is a warning."""
    if writer.name == "times.json":
        with pytest.warns(UserWarning, match="are not kept"):
            writer.save(path, version)
    else:
        with pytest.raises(SaveError, match="cannot be written"):
            writer.save(path, version)


def alone(path: Path) -> bool:
    return [each.name for each in path.parent.iterdir()] == [path.name]


# -- a full disk -------------------------------------------------------------------------------------------------------


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can grow beyond this: what a full disk does, done by the system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@by_name
def test_a_full_disk_leaves_the_old_file(name: str, writers: dict[str, Writer], tmp_path: Path) -> None:
    writer, path = writers[name], tmp_path / name
    writer.save(path, 1)
    size = path.stat().st_size
    path.unlink()
    writer.save(path, 0)
    before = path.read_bytes()
    for room in (0, 1, 100, size // 2, size - 1):
        with room_for(room):
            failing(writer, path, 1)
        assert path.read_bytes() == before, room
        assert alone(path)


STEPS: dict[str, Callable[[pytest.MonkeyPatch, Callable[..., Any]], None]] = {
    "flush": lambda patch, fault: patch.setattr(os, "fsync", fault),
    "rename": lambda patch, fault: patch.setattr(os, "replace", fault),
    "lock": lambda patch, fault: patch.setattr(writing, "_lock", fault),
    "mode": lambda patch, fault: patch.setattr(os, "fchmod", fault),
}


@by_name
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_leaves_the_old_file(
    name: str, step: str, writers: dict[str, Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, path = writers[name], tmp_path / name
    writer.save(path, 0)
    before = path.read_bytes()

    def fault(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        STEPS[step](patch, fault)
        failing(writer, path, 1)
    assert path.read_bytes() == before
    assert alone(path)


# -- folders -----------------------------------------------------------------------------------------------------------


@contextmanager
def unprivileged() -> Iterator[None]:
    """Rights are for those who are not root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@by_name
def test_a_folder_that_is_read_only(name: str, writers: dict[str, Writer]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        writers[name].save(path, 0)
        before = path.read_bytes()
        path.chmod(0o644)
        Path(folder).chmod(0o555)
        try:
            with unprivileged():
                failing(writers[name], path, 1)
        finally:
            Path(folder).chmod(0o700)
        assert path.read_bytes() == before
        assert alone(path)


@by_name
def test_places_where_no_file_can_be(name: str, writers: dict[str, Writer], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / name).mkdir(parents=True)
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / name)
    for folder in ("file", "folder", "pipes"):
        failing(writers[name], tmp_path / folder / name, 0)
    assert (tmp_path / "pipes" / name).is_fifo()
    assert (tmp_path / "folder" / name).is_dir()


# -- what a file is like -----------------------------------------------------------------------------------------------


@by_name
def test_modes_are_those_of_any_file(name: str, writers: dict[str, Writer], tmp_path: Path) -> None:
    path = tmp_path / name
    before = os.umask(0o027)
    try:
        writers[name].save(path, 0)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        writers[name].save(path, 1)  # as it is when a file is written over
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


@by_name
def test_a_link_stays_one(name: str, writers: dict[str, Writer], tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    link, target = tmp_path / "near" / name, tmp_path / "far" / "real"
    link.symlink_to(target)
    for version in (0, 1):  # at first it leads nowhere
        writers[name].save(link, version)
        assert link.is_symlink()
        assert alone(link)
        assert alone(target)
    assert target.is_file()
    assert writers[name].read(link) is not None


def test_names_may_be_long(writers: dict[str, Writer], tmp_path: Path) -> None:
    path = tmp_path / f"{'n' * 250}.qc"
    writers["model.qc"].save(path, 0)
    assert alone(path)


# -- processes and threads ---------------------------------------------------------------------------------------------


def killed(writer: Writer, path: Path, die: Callable[[], None]) -> None:
    """Save in a process that dies on the way."""
    child = os.fork()
    if child == 0:  # pragma: no cover - it dies
        try:
            die()
            for version in range(10_000):
                writer.save(path, version % 2)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def dies_at(step: str) -> None:
    """Let this process be killed at a step."""

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    STEPS[step](pytest.MonkeyPatch(), die)


def drafts(path: Path) -> list[Path]:
    return [each for each in path.parent.iterdir() if each.name.endswith(".draft")]


@by_name
def test_a_killed_process_leaves_a_whole_file_and_its_drafts_are_removed(
    name: str, writers: dict[str, Writer], tmp_path: Path
) -> None:
    writer, path = writers[name], tmp_path / name
    writer.save(path, 0)
    before = path.read_bytes()
    for step in ("mode", "flush", "rename"):
        killed(writer, path, partial(dies_at, step))
        assert path.read_bytes() == before
        assert len(drafts(path)) == 1, step
        (tmp_path / f".{name}.abc.draft").write_text("not ours")
        writer.save(path, 0)
        assert [each.name for each in drafts(path)] == [f".{name}.abc.draft"]
        (tmp_path / f".{name}.abc.draft").unlink()


@pytest.mark.slow
@by_name
def test_processes_killed_at_random_moments(name: str, writers: dict[str, Writer], tmp_path: Path) -> None:
    writer, path = writers[name], tmp_path / name
    contents = []
    for version in (0, 1):
        writer.save(path, version)
        contents.append(writer.read(path))
    chance = random.Random(name)
    for _ in range(40):
        moment = chance.uniform(0, 0.05)

        def die(moment: float = moment) -> None:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, moment + 1e-4)

        killed(writer, path, die)
        assert writer.read(path) in contents
        writer.save(path, 0)
        assert alone(path)


@by_name
def test_threads_that_save_to_one_path(name: str, writers: dict[str, Writer], tmp_path: Path) -> None:
    writer, path = writers[name], tmp_path / name
    contents = []
    for version in (0, 1):
        writer.save(path, version)
        contents.append(writer.read(path))
    faults: list[BaseException] = []

    def save(version: int) -> None:
        try:
            for _ in range(5):
                writer.save(path, version)
                assert writer.read(path) in contents
        except BaseException as error:  # noqa: BLE001 - told below
            faults.append(error)

    threads = [threading.Thread(target=save, args=(number % 2,)) for number in range(6)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not faults, faults
    assert alone(path)


def test_a_dump_whose_tensors_could_not_be_written_is_not_read_with_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump is three files: whichever of them is of another time, their digests do not agree."""
    path = tmp_path / "dump.txt"
    old, new = _programs()[0], qc.convert(calibrated())
    Snapshot.of(old).write(path)
    replace, left = os.replace, [1]

    def full(source: Any, target: Any) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(SaveError, match="No space left"):
            Snapshot.of(new).write(path)
    with pytest.raises(QuantcError):
        read_text(path)
    assert not drafts(path)


def test_a_draft_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    with writing.whole_file(path) as draft:
        draft.write_text("slow")
        write_text(path, "quick")
        assert draft.exists()
        assert path.read_text() == "quick"
    assert path.read_text() == "slow"
    assert alone(path)
