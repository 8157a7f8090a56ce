"""Large weights are packed on large pages where the system has them."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from quantc.targets.kernels import huge_pages
from quantc.targets.kernels.huge_pages import MIN_BYTES, PAGE, _advise, _new_ranges, on_large_pages

MEASURED = """
import re
from pathlib import Path
import torch
from quantc.targets.kernels.packing import packed_linear

def large():
    return int(re.search(r"AnonHugePages: +(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1]) * 1024

levels, scale = torch.ones(4096, 4096, dtype=torch.int8), torch.ones(4096)
before = large()
packed = packed_linear("fbgemm", levels, scale, None)
print(large() - before)
"""


@pytest.mark.skipif(_advise() is None, reason="this system has no large pages to ask for")
def test_a_large_weight_is_on_large_pages() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURED], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 6 * PAGE  # of the eight that 16 MiB are, some may have had no room for one


def test_small_ones_are_packed_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_advise", lambda: lambda start, size, advice: 0)
    threads = [on_large_pages(threading.current_thread, size) for size in (MIN_BYTES - 1, MIN_BYTES)]
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_without_large_pages_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_advise", lambda: None)
    assert on_large_pages(threading.current_thread, MIN_BYTES) is threading.current_thread()


def test_errors_come_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_advise", lambda: lambda start, size, advice: 0)

    def fails() -> None:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        on_large_pages(fails, MIN_BYTES)


def test_only_what_was_added_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(_new_ranges([(0, 4), (10, 12)], [(0, 6), (8, 20), (30, 31)])) == [(4, 6), (8, 10), (12, 20), (30, 31)]
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(huge_pages, "_advise", lambda: lambda start, size, advice: asked.append((start, size)))
    held = on_large_pages(lambda: torch.ones(64 << 20, dtype=torch.uint8), 64 << 20)
    start = held.data_ptr()
    assert any(first <= start + PAGE and start + (60 << 20) <= first + size for first, size in asked)
    assert all(first % PAGE == 0 and size % PAGE == 0 for first, size in asked)
