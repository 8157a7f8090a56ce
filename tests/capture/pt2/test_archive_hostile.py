"""Hostile `.pt2` files. Each carries a payload that makes a directory; loading must raise and must not make it.

The payloads are real: `test_torch_runs_the_payloads` shows, in another process, that torch's own loader runs them.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._export.serde import schema

from quantc.capture.pt2.archive import load_exported
from quantc.capture.pt2.document_checks import _hints, _kind
from quantc.capture.pt2.operator_checks import SYMBOLIC, why_not_operator
from quantc.capture.pt2.schema_rules import KEYS, RULES
from quantc.errors import LoadError
from tests.support.archives import MODEL, SAMPLES, WEIGHTS, edited, leaves, members_of, zipped
from tests.support.hostile import HONEST, MAKERS, Maker, changed, renamed, touch, touch_unquoted

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


def refusal(data: bytes, folder: Path) -> str:
    file = folder / "model.pt2"
    file.write_bytes(data)
    with pytest.raises(LoadError) as caught:
        load_exported(file)
    return str(caught.value)


TARGETS = (
    "builtins.eval",
    "torch.load",
    "torch.hub.load",
    "torch.ops.load_library",
    "torch.ops.aten.from_file.default",
    "torch.ops.aten.save.default",
    "torch.ops.aten.no_such_op.default",
    "torch.ops.debugprims.load_tensor.default",
    "torch.ops.higher_order.flat_apply",
    "torch.ops.higher_order.call_torchbind",
    "torch.ops.higher_order.aoti_call_delegate",
    "torch.ops.aten.relu.default.__class__",
    "torch.classes.x.y",
    "_operator.methodcaller",
    "_operator.attrgetter",
    "math.__loader__.load_module",
    "#extension:op",
    "",
)


@pytest.mark.parametrize("target", TARGETS)
def test_only_known_operators(target: str, tmp_path: Path) -> None:
    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["target"] = target

    text = refusal(edited(HONEST, {MODEL: edit}), tmp_path)
    assert "graph_module.graph.nodes[0].target" in text
    assert "calls" in text


def test_operator_handed_to_a_higher_order_op(tmp_path: Path) -> None:
    argument = {"name": "", "arg": {"as_operator": "torch.ops.load_library"}, "kind": 1}

    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["inputs"].append(argument)

    assert "as_operator" in refusal(edited(HONEST, {MODEL: edit}), tmp_path)


def test_attribute_paths_stay_inside_the_module(tmp_path: Path) -> None:
    edit = renamed("linear.weight", "__class__.__base__.forward")
    assert "not a path of module attributes" in refusal(edited(HONEST, {MODEL: edit, WEIGHTS: edit}), tmp_path)


def test_source_functions_are_not_walked_into_builtins(tmp_path: Path) -> None:
    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["metadata"]["source_fn_stack"] = "x,torch.load.__globals__"

    assert "source function" in refusal(edited(HONEST, {MODEL: edit}), tmp_path)


def test_custom_objects(tmp_path: Path) -> None:
    spec = {"custom_obj": {"arg": {"name": "x", "class_fqn": "__torch__.torch.classes.a.B"}, "custom_obj_name": "b"}}

    def edit(document: Any) -> None:
        document["graph_module"]["signature"]["input_specs"].append(spec)

    text = refusal(edited(HONEST, {MODEL: edit}), tmp_path)
    assert "custom class" in text
    assert "without custom class objects" in text


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ("data/aotinductor/model/model.so", "AOTInductor"),
        ("data/aotinductor/model/wrapper.cpp", "AOTInductor"),
        ("data/constants/custom_obj_0", "custom class"),
        ("data/constants/opaque_obj_0", "pickled Python object"),
        ("data/executorch/model.pte", "ExecuTorch"),
        ("data/weights/model.pt", "pickled form"),
        ("code/evil.py", "unknown kind of file"),
        ("../evil", "outside its folder"),
        ("data/../../evil", "outside its folder"),
        ("/etc/evil", "outside its folder"),
        ("data\\evil", "odd name"),
        ("data/\x07bell", "odd name"),
    ],
)
def test_foreign_members(member: str, says: str, tmp_path: Path) -> None:
    assert says in refusal(edited(HONEST, {}, {member: b"\x7fELF"}), tmp_path)


def test_members_outside_the_root(tmp_path: Path) -> None:
    for name in ("evil", "../evil", "/evil", "other/models/model.json"):
        buffer = io.BytesIO(HONEST)
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.writestr(name, b"x")
        refusal(buffer.getvalue(), tmp_path)


def test_member_twice(tmp_path: Path) -> None:
    buffer = io.BytesIO(zipped(members_of(HONEST)))
    with zipfile.ZipFile(buffer, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(f"archive/{MODEL}", b"{}")
    assert "twice" in refusal(buffer.getvalue(), tmp_path)


def test_zip_bomb_by_compression(tmp_path: Path) -> None:
    members = {**members_of(HONEST), "data/weights/weight_0": bytes(1 << 26)}
    data = zipped(members, zipfile.ZIP_DEFLATED)
    assert len(data) < 1 << 20
    assert "compressed" in refusal(data, tmp_path)


def test_zip_bomb_by_declared_size(tmp_path: Path) -> None:
    """The directory of the archive claims four gigabytes for a member of 48 bytes."""
    data = bytearray(zipped(members_of(HONEST)))
    entry = data.rindex(b"archive/data/weights/weight_0") - 46
    assert data[entry : entry + 4] == b"PK\x01\x02"
    data[entry + 20 : entry + 28] = (0xFFFFFFF0).to_bytes(4, "little") * 2
    assert "claims to hold" in refusal(bytes(data), tmp_path)


def test_zip_bomb_by_overlap(tmp_path: Path) -> None:
    """Many names for the same bytes: more data than the file is long."""
    buffer = io.BytesIO(zipped({**members_of(HONEST), "data/weights/weight_0": bytes(1 << 16)}))
    with zipfile.ZipFile(buffer, "a") as archive:
        source = archive.getinfo("archive/data/weights/weight_0")
        for index in range(100, 150):
            copy = zipfile.ZipInfo(f"archive/data/weights/weight_{index}")
            copy.file_size = copy.compress_size = source.file_size
            copy.CRC, copy.header_offset = source.CRC, source.header_offset
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
        archive.writestr("archive/extra/last", b"")
    assert "claims to hold" in refusal(buffer.getvalue(), tmp_path)


def test_bomb_inside_the_sample_inputs(tmp_path: Path) -> None:
    inner = zipped({"data.pkl": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(edited(HONEST, {}, {SAMPLES: inner}), tmp_path)


def test_tensor_larger_than_its_bytes(tmp_path: Path) -> None:
    sizes = ("config", "linear.weight", "tensor_meta", "sizes")
    edit = changed(sizes, [{"as_int": 1 << 40}, {"as_int": 4}])
    assert "linear.weight" in refusal(edited(HONEST, {WEIGHTS: edit}), tmp_path)


def test_weight_without_bytes(tmp_path: Path) -> None:
    text = refusal(edited(HONEST, {}, {"data/weights/weight_0": b""}), tmp_path)
    assert "fake weights" in text


def test_counting_to_a_huge_symbol(tmp_path: Path) -> None:
    edit = changed(("range_constraints",), {"u99999999999": {"min_val": 0, "max_val": None}})
    assert "range_constraints" in refusal(edited(HONEST, {MODEL: edit}), tmp_path)


def test_every_text_of_the_schema_has_a_rule() -> None:
    """A newer torch may add fields; each needs a decision here before files that use it load."""
    seen: set[type] = set()
    fields: set[tuple[str, str]] = set()
    tables: set[tuple[str, str]] = set()
    stack: list[tuple[object, tuple[str, str]]] = [(schema.ExportedProgram, ("", "")), (schema.PayloadConfig, ("", ""))]
    while stack:
        hint, field = stack.pop()
        kind, inner = _kind(hint)
        assert kind != "unknown", field
        if kind == "str":
            fields.add(field)
        elif kind in ("list", "dict", "optional"):
            tables |= {field} if kind == "dict" else set()
            stack.append((inner, field))
        elif kind in ("record", "union") and isinstance(inner, type) and inner not in seen:
            seen.add(inner)
            stack.extend((hint, (inner.__name__, name)) for name, hint in _hints(inner).items())
    assert fields == RULES.keys()
    assert tables == KEYS.keys()


def test_symbolic_operators_are_those_torch_writes() -> None:
    from torch._export.serde.serialize import _SYM_OPS

    assert {f"{op.__module__}.{op.__name__}" for op in _SYM_OPS} <= SYMBOLIC
    assert all(why_not_operator(name) is None for name in SYMBOLIC)


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
