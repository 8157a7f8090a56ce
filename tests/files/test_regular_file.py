"""Regular files are read, whatever the reader; pipes, devices and folders are refused at once."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import quantc as qc
from quantc.calibration.checkpoint import Checkpoint
from quantc.errors import ConfigError, LoadError, SaveError
from quantc.files.regular_file import as_path, check_regular, read_bytes
from quantc.files.regular_file import read_text as text_of
from quantc.observe import Statistics
from quantc.targets.executorch.reading import load as load_pte
from quantc.targets.kernels.tuning import Times
from quantc.text.files import Snapshot, read_text
from tests.support.store_files import images, small_model


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """An error if it takes longer: a pipe without a writer waits for ever."""

    def late(*args: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


READERS: dict[str, Callable[[Path], Any]] = {
    "model.qc": qc.load,
    "model": qc.load,
    "model.pte": qc.load,
    "other.pte": load_pte,
    "model.pt2": qc.capture,
    "seen.safetensors": Statistics.load,
    "checkpoint.safetensors": lambda path: Checkpoint(path, 1, {}).read(),
    "config.toml": qc.QuantConfig.load,
    "config.json": qc.QuantConfig.load,
    "dump.txt": read_text,
}


@pytest.mark.parametrize("name", READERS)
def test_pipes_devices_and_folders_are_not_read(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "folder" / name).mkdir(parents=True)
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / name).symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / "folder" / name, tmp_path / "devices" / name):
        with within(5), pytest.raises((LoadError, ConfigError)) as caught:
            READERS[name](path)
        assert path.name in str(caught.value)
        assert caught.value.advice


def test_a_pipe_beside_a_text_is_not_read(tmp_path: Path) -> None:
    Snapshot.of(qc.capture(small_model(), (images(),))).write(tmp_path / "dump.txt")
    (tmp_path / "dump.safetensors").unlink()
    os.mkfifo(tmp_path / "dump.safetensors")
    with within(5), pytest.raises(LoadError, match="it is a pipe"):
        read_text(tmp_path / "dump.txt")


def test_a_pipe_for_a_cache_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "times.json")
    with within(5), pytest.warns(UserWarning, match="is not used: no such file: .* it is a pipe"):
        assert Times(tmp_path / "times.json").read() == {}


def test_a_path_is_text_or_a_path_and_nothing_else() -> None:
    assert (
        as_path("folder/model.qc", LoadError) == as_path(Path("folder/model.qc"), SaveError) == Path("folder/model.qc")
    )
    for given in (None, 3, ["model.qc"]):
        with pytest.raises(SaveError, match=f"a {type(given).__name__} is no path") as caught:
            as_path(given, SaveError)
        assert repr(given) in str(caught.value.where)


def test_what_is_no_file_is_refused_with_the_error_and_the_advice_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml") as caught:
        check_regular(tmp_path / "missing.toml", "write one", ConfigError)
    assert caught.value.advice == "write one"
    assert caught.value.where == str(tmp_path / "missing.toml")
    os.mkfifo(tmp_path / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path)  # the path of a socket has to be short
        listening.bind("socket")
    finally:
        os.fchdir(here)
        os.close(here)
        listening.close()
    for name, kind in {".": "a folder", "pipe": "a pipe", "socket": "a socket", "/dev/null": "a device"}.items():
        with pytest.raises(LoadError, match=f"it is {kind}"):
            check_regular(tmp_path / name, "give another")
    with pytest.raises(LoadError, match="null"):
        check_regular("with\0null", "give another")


def test_a_link_to_a_file_is_read_as_that_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\0\xff")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert check_regular(str(tmp_path / "link"), "") == tmp_path / "link"
    assert read_bytes(tmp_path / "link", "") == b"\0\xff"


def test_what_is_longer_than_asked_for_is_refused_and_what_is_as_long_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, "", most=5) == b"12345"
    assert text_of(path, "", most=5) == "12345"
    for read in (read_bytes, text_of):
        with pytest.raises(LoadError, match="larger than 4 bytes"):
            read(path, "", most=4)


def test_text_is_utf8_with_line_breaks_of_one_kind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes("é\r\nsecond\nthird\r".encode())
    assert text_of(path, "") == "é\nsecond\nthird\r"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match="UTF-8") as caught:
        text_of(path, "save it as UTF-8", ConfigError)
    assert caught.value.advice == "save it as UTF-8"
