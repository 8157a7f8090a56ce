"""quantc's own kernels are compiled once, kept, and missed without harm."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.targets.kernels import native_library as native
from tests.support.native import needs_compiler
from tests.support.stored_weights import lowered

BIG = 640


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No library is loaded, and none is kept; the folder it would be kept in."""
    monkeypatch.setenv("QUANTC_CACHE", str(tmp_path))
    monkeypatch.delenv(native.SWITCH, raising=False)
    if not native.instructions(""):
        pytest.skip("the processor has none of the instructions that are needed")
    before = dict(native.LOADED)
    native._library.cache_clear()
    yield tmp_path / "native"
    native._library.cache_clear()
    native.LOADED.update(before)


def kernel_and_reason() -> tuple[str, str]:
    _, module = lowered(nn.Linear(BIG, BIG), torch.randn(2, BIG), qc.INT8_WEIGHT_ONLY)
    x = torch.randn(3, BIG)
    assert torch.allclose(module(x), module.program(x), rtol=1e-4, atol=1e-5)
    return module.placed[0].kernel, module.placed[0].reason


def fake_compiler(folder: Path, text: str) -> str:
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("setting", ["0", "off"])
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(native.SWITCH, setting)
    kernel, reason = kernel_and_reason()
    assert "native" not in kernel
    assert reason == f"QUANTC_NATIVE={setting} switches quantc's own kernels off"


def test_without_a_compiler_another_kernel_runs_and_says_why(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(unknown))
    monkeypatch.delenv("CXX", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a machine without one is nothing to warn of
        kernel, reason = kernel_and_reason()
    assert "native" not in kernel
    assert reason == "there is no C++ compiler for quantc's own kernels: install g++, or set CXX"
    assert not unknown.exists()


def test_a_compiler_that_fails_is_warned_of_once(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(unknown.parent, "echo 'no such thing as AVX' >&2; exit 1"))
    with pytest.warns(UserWarning, match=r"did not compile.*no such thing as AVX.*QUANTC_NATIVE=0"):
        kernel, reason = kernel_and_reason()
    assert "native" not in kernel
    assert "no such thing as AVX" in reason
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert kernel_and_reason() == (kernel, reason)


def test_what_is_no_library_is_not_loaded(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(unknown.parent, 'for last; do :; done; echo nonsense > "$last"'))
    with pytest.warns(UserWarning, match="cannot be loaded"):
        assert "native" not in kernel_and_reason()[0]


def test_a_folder_that_cannot_be_made_is_told(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake_compiler(unknown.parent, 'for last; do :; done; echo nonsense > "$last"'))
    unknown.write_text("a file in its place", encoding="utf-8")
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert "native" not in kernel_and_reason()[0]


def test_what_anybody_may_write_is_not_run(unknown: Path) -> None:
    kind = native.instructions("")
    unknown.mkdir()
    path = unknown / f"{native.digest(kind)}-{kind}.so"
    path.write_bytes(b"")
    path.chmod(0o666)
    with pytest.warns(UserWarning, match="anybody may write to it"):
        assert "native" not in kernel_and_reason()[0]


def test_other_sources_or_flags_are_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {kind: native.digest(kind) for kind in native.FLAGS}
    assert len(set(before.values())) == len(before)
    monkeypatch.setattr(native, "COMMON", (*native.COMMON, "-g"))
    assert native.digest("avx2") != before["avx2"]
    known = native.sources()
    assert {"linear_w8.cpp", "linear_w4.cpp", "lanes.h", "blocks.h"} <= set(known)
    monkeypatch.undo()
    monkeypatch.setattr(native, "sources", lambda: {**known, "linear_w8.cpp": b""})
    assert native.digest("avx2") != before["avx2"]


def test_settings_of_torch_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for name in native.HELD_TO_AVX2:
        monkeypatch.delenv(name, raising=False)
    assert native.instructions("") == ("avx512" if sys.platform == "linux" else "")
    for name in native.HELD_TO_AVX2:
        with monkeypatch.context() as here:
            here.setenv(name, "AVX2")
            assert native.instructions("") == ("avx2" if sys.platform == "linux" else "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert native.instructions("avx2") == ""


LOADS = "from quantc.targets.kernels.native_library import native_library; print(native_library().instructions)"


@pytest.mark.slow
@needs_compiler
def test_several_processes_compile_at_once(tmp_path: Path) -> None:
    settings = {**os.environ, "QUANTC_CACHE": str(tmp_path), native.SWITCH: "avx2"}
    runs = [
        subprocess.Popen([sys.executable, "-c", LOADS], env=settings, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [run.communicate()[0] for run in runs] == ["avx2\n"] * 3
    assert [path.name for path in (tmp_path / "native").iterdir()] == [f"{native.digest('avx2')}-avx2.so"]
    nowhere = {**settings, "PATH": str(tmp_path), "CXX": ""}  # kept: no compiler is needed the next time
    assert subprocess.run([sys.executable, "-c", LOADS], env=nowhere, capture_output=True, text=True, check=True).stdout
