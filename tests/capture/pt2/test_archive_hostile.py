"""Hostile `.pt2` files. Each carries a payload that makes a directory; loading must raise and must not make it.

The payloads are real: `test_torch_runs_the_payloads` shows, in another process, that torch's own loader runs them.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.capture.pt2.archive import load_exported
from quantc.errors import LoadError
from tests.support.archives import MODEL, edited, leaves, members_of, refusal
from tests.support.hostile import HONEST, MAKERS, Maker, changed, touch, touch_unquoted

RUN = """
import logging, pathlib, sys, torch
logging.disable(logging.CRITICAL)
folder = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(folder))
for file in sorted(folder.glob("*.pt2")):
    marker = folder / file.stem
    try:
        module = torch.export.load(file).module()
        module(torch.randn(5, 4), {"k": torch.randn(2)}, mode="relu")
    except Exception:
        pass
    print(file.stem, marker.exists())
"""


def test_torch_runs_the_payloads(tmp_path: Path) -> None:
    """Without this the tests below would prove nothing: torch's own loader does run every one of them."""
    for maker in MAKERS:
        marker = tmp_path / maker.__name__
        marker.with_suffix(".pt2").write_bytes(maker(marker))
        marker.with_suffix(".py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path)], capture_output=True, text=True, check=True
    )
    ran = dict(line.split() for line in done.stdout.splitlines())
    assert ran == {maker.__name__: "True" for maker in MAKERS}


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: str(maker.__name__))
def test_no_payload_runs(maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    marker.with_suffix(".py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "model.pt2"
    file.write_bytes(maker(marker))
    with pytest.raises(LoadError) as caught:
        load_exported(file)
    assert not marker.exists()
    assert str(file) in (caught.value.where or "")


def test_counting_to_a_huge_symbol(tmp_path: Path) -> None:
    edit = changed(("range_constraints",), {"u99999999999": {"min_val": 0, "max_val": None}})
    assert "range_constraints" in refusal(edited(HONEST, {MODEL: edit}), tmp_path)


DOCUMENT = json.loads(members_of(HONEST)[MODEL])
PATHS = sorted(leaves(DOCUMENT), key=str)
PAYLOADS: tuple[Callable[[Path], str], ...] = (
    touch,
    touch_unquoted,
    lambda marker: f"x={touch(marker)}",
    lambda marker: f"x'+str({touch_unquoted(marker)})+'",
    lambda marker: f'x"+str({touch_unquoted(marker)})+"',
    lambda marker: f"x):\n  pass\n{touch(marker)}\ndef forward(self",
    lambda marker: f"x\n{touch(marker)}\n",
)
VALUES: st.SearchStrategy[object] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just([]) | st.just({})
)


@settings(max_examples=150)
@given(path=st.sampled_from(PATHS), index=st.integers(0, len(PAYLOADS)), value=VALUES)
def test_any_field_replaced(path: tuple[str | int, ...], index: int, value: object, tmp_path: Path) -> None:
    """A payload or nonsense in any one field of the program: it loads or it is refused, and it never runs."""
    marker = tmp_path / "marker"
    planted = PAYLOADS[index](marker) if index < len(PAYLOADS) else value
    file = tmp_path / "model.pt2"
    file.write_bytes(edited(HONEST, {MODEL: changed(path, planted)}))
    try:
        program = load_exported(file)
    except LoadError:
        assert not marker.exists()
        return
    call_anyway(program)
    assert not marker.exists()


def call_anyway(program: torch.export.ExportedProgram) -> None:
    """Nonsense may still fail when run, in any way; what counts is what it leaves behind."""
    with contextlib.suppress(Exception):
        program.module()(torch.randn(5, 4), {"k": torch.randn(2)}, mode="relu")
