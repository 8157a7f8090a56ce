"""No file, however damaged or forged, does more than raise a LoadError: nothing runs, nothing hangs, nothing is half there.

Damage is found by digests; a forger can write digests that agree, so most tests here do just that.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import quantc as qc
from quantc.errors import LoadError, QuantcError
from quantc.ir.program import Program
from quantc.store.file_versions import FIELD
from tests.support.store_files import Parts, calibrated, images, put_together, taken_apart


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated program: its file has one of everything."""
    path = tmp_path_factory.mktemp("store") / "original.qc"
    calibrated().save(path)
    return path


@pytest.fixture(scope="module")
def parts(original: Path) -> Parts:
    return Parts(original)


def refused(path: Path) -> LoadError:
    with pytest.raises(LoadError) as caught:
        qc.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.advice
    return caught.value


# -- damage ----------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_refused_wherever_it_ends(original: Path, tmp_path: Path) -> None:
    whole, path = original.read_bytes(), tmp_path / "cut.qc"
    cuts = [*range(40), *range(40, len(whole), 1499), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        refused(path)
    path.write_bytes(whole + b"\0")
    refused(path)


def test_no_byte_can_be_changed(original: Path, tmp_path: Path) -> None:
    """Every byte of the header in turn, and a sample of the others: all are accounted for."""
    whole, path = original.read_bytes(), tmp_path / "changed.qc"
    header = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(0)
    places = [*range(0, header, 3), *range(header - 16, header), *chance.sample(range(header, len(whole)), 100)]
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= chance.choice([1, 2, 4, 0x20, 0x80])
        path.write_bytes(changed)
        refused(path)


def test_spaces_in_the_header_cannot_be_changed(original: Path, tmp_path: Path) -> None:
    """JSON does not care for them; the digest of the header does."""
    whole, path = original.read_bytes(), tmp_path / "changed.qc"
    length = int.from_bytes(whole[:8], "little")
    assert whole[8 + length - 1] in (0x20, ord("}"))
    padded = whole[8 : 8 + length] + b" " * 8
    path.write_bytes((length + 8).to_bytes(8, "little") + padded + whole[8 + length :])
    assert "the header has been changed" in refused(path).what


def test_a_changed_tensor_is_named(original: Path, tmp_path: Path) -> None:
    whole, path = bytearray(original.read_bytes()), tmp_path / "changed.qc"
    length = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + length])
    for name in ("constants/conv.bias", "inputs/0", "document"):
        start, _ = entries[name]["data_offsets"]
        changed = bytearray(whole)
        changed[8 + length + start] ^= 1
        path.write_bytes(changed)
        assert f"the tensor {name!r} has been changed" in refused(path).what


def relabelled(original: Path, path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document, tensors = taken_apart(original)
    put_together(path, document, tensors)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    label = json.loads(header["__metadata__"][FIELD])
    change(label)
    header["__metadata__"][FIELD] = json.dumps(label)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


LABELS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format": (lambda label: label.update(format="quantc.statistics"), "the field 'format' is 'quantc.statistics'"),
    "newer version": (
        lambda label: label.update(version=4),
        "the field 'version' is 4, and this quantc reads 1, 2, 3",
    ),
    "version of another type": (lambda label: label.update(version="one"), "version"),
    "no version": (lambda label: label.pop("version"), "version"),
    "extra field": (lambda label: label.update(more=1), "more"),
    "digest of another form": (lambda label: label.update(header="x"), "header"),
    "digests of another type": (lambda label: label.update(digests=[]), "digests"),
    "missing digest": (lambda label: label["digests"].pop("inputs/0"), "the header has been changed"),
}


@pytest.mark.parametrize("case", LABELS)
def test_a_label_of_another_kind_is_refused_and_the_field_named(case: str, original: Path, tmp_path: Path) -> None:
    change, told = LABELS[case]
    relabelled(original, tmp_path / "label.qc", change)
    assert told in str(refused(tmp_path / "label.qc"))


def test_other_files_are_refused(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "missing.qc").what
    assert "no such file" in refused(tmp_path).what
    (tmp_path / "empty.qc").write_bytes(b"")
    (tmp_path / "zip.qc").write_bytes(b"PK\3\4" + bytes(100))
    torch.save({"a": torch.ones(1)}, tmp_path / "pickle.qc")
    (tmp_path / "long.qc").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    for name in ("empty.qc", "zip.qc", "pickle.qc", "long.qc"):
        assert "not a safetensors file" in refused(tmp_path / name).what
    torch.export.save(torch.export.export(torch.nn.ReLU(), (images(),)), tmp_path / "model.pt2")
    assert "qc.capture" in str(refused(tmp_path / "model.pt2").advice)
    save_file({"a": torch.ones(1)}, tmp_path / "weights.qc")
    assert "no field 'quantc'" in refused(tmp_path / "weights.qc").what


HEADERS = {
    "huge shape": b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}',
    "negative shape": b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}',
    "backward": b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}',
    "beyond the end": b'{"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}',
    "hole": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
    "unknown dtype": b'{"a":{"dtype":"X9","shape":[4],"data_offsets":[0,16]}}',
    "narrow dtype": b'{"__metadata__":{"quantc":"{}"},"a":{"dtype":"F4","shape":[32],"data_offsets":[0,16]}}',
    "deep": b"[" * 100_000,
    "no text": b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie_are_refused(case: str, tmp_path: Path) -> None:
    text = HEADERS[case]
    (tmp_path / "lie.qc").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    refused(tmp_path / "lie.qc")


# -- forged documents ------------------------------------------------------------------------------------------

Forge = Callable[[dict[str, Any], dict[str, Tensor]], object]
FORGED: dict[str, tuple[Forge, str]] = {
    "no text": (lambda d, _: d.pop("text"), "text: Field required"),
    "extra field": (lambda d, _: d.update(code="print(1)"), "code"),
    "text of another type": (lambda d, _: d.update(text=1), "text"),
    "log": (lambda d, _: d["log"][0].update(seconds="fast"), "log.0.seconds"),
    "stage": (lambda d, _: d.update(text=d["text"].replace("stage=calibrated", "stage=done")), "unknown stage 'done'"),
    "origin of no node": (lambda d, _: d["origins"]["nodes"].update(nobody=0), "unknown node 'nobody'"),
    "no such origin": (lambda d, _: d["origins"]["nodes"].update(relu=99), "no origin 99"),
    "inputs": (lambda d, _: d.update(inputs=[]), "0 inputs for 1"),
    "input of another name": (lambda d, _: d.update(inputs=["7"]), "nothing is known of the tensor 'inputs/7'"),
    "claim of no node": (
        lambda d, _: d["plan"]["claims"].update(nobody=next(iter(d["plan"]["claims"].values()))),
        "unknown node 'nobody'",
    ),
    "part": (lambda d, _: next(iter(d["plan"]["claims"].values())).update(part="halved"), "part"),
    "reason of no node": (lambda d, _: d["plan"]["left_float"].update(nobody="why"), "unknown node 'nobody'"),
    "no site": (lambda d, _: d["plan"]["outcomes"].update({"relu": 0}), "'relu' is not a site"),
    "no use": (lambda d, _: d["plan"]["outcomes"].update({"relu:out0": 99}), "no use number 99"),
    "negative use": (lambda d, _: d["plan"]["outcomes"].update({"relu:out0": -1}), "plan.outcomes.relu:out0"),
    "use of no kind": (lambda d, _: d["plan"]["uses"].append({"kind": "guess"}), "plan.uses"),
    "spec": (lambda d, _: _spec(d).update(dtype="int9"), "dtype"),
    "range of a spec": (lambda d, _: _spec(d).update(qmin=-4000), "qmin"),
    "observation": (
        lambda d, _: _spec(d).update(observe={"name": "guess", "options": {}}),
        "unknown observation 'guess'",
    ),
    "group without places": (lambda d, _: d["plan"]["groups"][0].update(places=[]), "at least one place"),
    "group of another source": (lambda d, _: d["plan"]["groups"][0].update(source="thin air"), "source"),
    "group left float": (
        lambda d, _: (d["plan"]["uses"].append({"kind": "float"}), d["plan"]["groups"][0].update(use=_last_use(d))),
        "no group is float",
    ),
    "observer of no node": (
        lambda d, _: d["observers"].update(relu={"group": "conv2d:in0", "where": "", "enabled": True}),
        "no node calls this observer",
    ),
    "observer of another type": (lambda d, _: d["observers"].update(relu={"group": 1}), "observers.relu.group"),
    "batches": (lambda d, _: d["plan"].update(batches=-1), "plan.batches"),
    "batches of another type": (lambda d, _: d["plan"].update(batches=True), "plan.batches"),
    "config": (lambda d, _: d["plan"].update(config={"rules": [{"select": {"by": "luck"}, "use": "FLOAT"}]}), "select"),
    "statistics of another kind": (
        lambda d, _: _statistics(d).update(statistics="guess"),
        "unknown observation 'guess'",
    ),
    "statistics without tensors": (lambda d, _: _statistics(d).update(tensors=[]), "is missing"),
    "qparams without tensors": (lambda d, _: d["plan"].update(qparams=["relu:out0"]), "qparams/relu:out0/scale"),
    "bad scale": (
        lambda d, _: (
            d["plan"].update(qparams=["g"]),
            d["records"].update(
                {
                    "qparams/g/scale": {"form": "filled", "type": "f32[]", "value": "0000c07f"},
                    "qparams/g/zero_point": {"form": "filled", "type": "i64[]", "value": "00" * 8},
                }
            ),
        ),
        "'scale' is not positive float32",
    ),
    "record of no form": (lambda d, _: d["records"]["inputs/0"].update(form="folded"), "records.inputs/0"),
    "group of another timing": (
        lambda d, _: d["plan"]["groups"][0].update(source="run-time"),
        "do not come from 'run-time'",
    ),
    "content of nobody": (
        lambda d, _: d["records"]["inputs/0"].update(at="inputs/9"),
        "no tensor 'inputs/9' is stored",
    ),
    "content of the document": (
        lambda d, _: d["records"]["inputs/0"].update(at="document"),
        "no tensor 'document' is stored",
    ),
    "content of another": (
        lambda d, _: d["records"]["inputs/0"].update(at="constants/conv.bias"),
        "torch.float32 [6] is stored",
    ),
    "content of a filled tensor": (
        lambda d, _: d["records"].update(stray={"form": "filled", "type": "f32[]", "value": "0" * 8, "at": "inputs/0"}),
        "records.stray",
    ),
    "many of one content": (
        lambda d, t: (
            t.update(seed=torch.zeros(1 << 20, dtype=torch.uint8)),
            d["records"].update(
                {f"constants/{index}": {"form": "plain", "type": "u8[1048576]", "at": "seed"} for index in range(400)}
            ),
        ),
        "too large for what the file stores",
    ),
    "record without tensor": (lambda _, t: t.pop("inputs/0"), "the tensor is missing"),
    "tensor without record": (lambda _, t: t.update(stray=torch.ones(1)), "'stray' belongs to nothing"),
    "record of nothing": (
        lambda d, _: d["records"].update(stray={"form": "filled", "type": "f32[]", "value": "00000000"}),
        "'stray' belongs to nothing",
    ),
    "input of another shape": (
        lambda d, t: (t.update({"inputs/0": torch.arange(2.0)}), d["records"]["inputs/0"].update(type="f32[2]")),
        "input 'x' is f32[2], but the program was captured for f32[batch,3,6,6]",
    ),
    "constant of other numbers": (lambda _, t: t["constants/conv.bias"].add_(1), "has digest"),
    "constant of no name": (
        lambda d, _: d["records"].pop("constants/conv.bias"),
        "no constant is given for 'conv.bias'",
    ),
}


def _spec(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(use["spec"] for use in document["plan"]["uses"] if use["kind"] == "quantize")
    return found


def _last_use(document: dict[str, Any]) -> int:
    return len(document["plan"]["uses"]) - 1


def _statistics(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(document["plan"]["statistics"].values()))
    return found


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_document_is_refused_and_the_field_named(case: str, parts: Parts, tmp_path: Path) -> None:
    forge, told = FORGED[case]
    document, tensors = parts.copy()
    forge(document, tensors)
    put_together(tmp_path / "forged.qc", document, tensors)
    assert told in str(refused(tmp_path / "forged.qc"))


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"{", b"\xff", b'{"text": "\\ud800"}', b"[" * 10_000, b"1e999", b'{"a":1,"a":2}']
)
def test_documents_that_are_no_documents_are_refused(text: bytes, parts: Parts, tmp_path: Path) -> None:
    put_together(tmp_path / "forged.qc", text, parts.copy()[1])
    assert "its document does not read" in refused(tmp_path / "forged.qc").what


def test_a_file_without_a_document_is_refused(parts: Parts, tmp_path: Path) -> None:
    from quantc.store import file_versions

    file_versions.write(tmp_path / "forged.qc", parts.copy()[1])
    assert "'document' is missing" in refused(tmp_path / "forged.qc").what


# -- text that means harm --------------------------------------------------------------------------------------

BOOM = "__import__('pathlib').Path('boom').touch()"
CALLS = {
    "os.system": 'os:system("touch boom")',
    "posix.system": 'posix:system("touch boom")',
    "subprocess": 'subprocess:run(["touch", "boom"])',
    "eval": f'builtins:eval("{BOOM}")',
    "exec": f'builtins:exec("{BOOM}")',
    "import": 'builtins:__import__("boom_module")',
    "open": 'builtins:open("boom", "w")',
    "torch.load": 'torch:load("boom")',
    "torch.save": 'torch:save(%x, "boom")',
    "torch.hub": 'torch.hub:load("boom", "boom")',
    "torch.compile": "torch:compile(%x)",
    "operator.call": "operator:call(%x)",
    "methodcaller": 'operator:methodcaller("boom")',
    "torch from_file": 'torch:from_file("boom", True, 4)',
    "aten from_file": 'aten.from_file.default("boom", True, 4)',
    "aten print": 'aten._print.default("boom")',
    "profiler": 'profiler._record_function_enter_new.default("boom")',
    "higher-order op that runs code": 'higher_order.call_torchbind(%x, "boom")',
    "op as an argument": "torch:relu(%x, &aten.from_file.default)",
    "method": 'call_method .tofile(%x, "boom")',
    "private method": "call_method .__reduce__(%x)",
    "getattr": 'builtins:getattr(%x, "__class__")',
    "module": 'call_module @"boom"(%x)',
    "name that breaks out": f'call_module @"a\\"); {BOOM}; (\\""(%x)',
    "object": 'torch:relu(%x, opaque("boom"))',
}


@pytest.mark.parametrize("case", CALLS)
def test_text_that_calls_out_is_refused_and_runs_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boom_module.py").write_text("from pathlib import Path\nPath('boom').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    program = qc.parse('program "N" stage=captured\n  input %x : f32[2]\n  %y = torch:relu(%x)\n  output (%y,)\n')
    program.save(tmp_path / "forged.qc")
    document, tensors = taken_apart(tmp_path / "forged.qc")
    document["text"] = document["text"].replace("torch:relu(%x)", CALLS[case])
    put_together(tmp_path / "forged.qc", document, tensors)
    refused(tmp_path / "forged.qc")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["boom_module.py", "forged.qc"]
    assert "boom_module" not in sys.modules


def test_messages_cannot_rewrite_a_terminal(parts: Parts, tmp_path: Path) -> None:
    document, tensors = parts.copy()
    document["text"] = document["text"].replace("relu(", "\x1b[2Jrelu(")
    put_together(tmp_path / "forged.qc", document, tensors)
    assert "\x1b" not in str(refused(tmp_path / "forged.qc"))
    document, tensors = parts.copy()
    document["records"]["constants/\x1b[2J"] = document["records"].pop("constants/conv.bias")
    tensors["constants/\x1b[2J"] = tensors.pop("constants/conv.bias")
    put_together(tmp_path / "forged.qc", document, tensors)
    assert "no constant is given for 'conv.bias'" in refused(tmp_path / "forged.qc").what
    assert "\x1b" not in str(refused(tmp_path / "forged.qc"))
    document, tensors = parts.copy()
    document["plan"]["left_float"]["\x1b[2J"] = "why"
    put_together(tmp_path / "forged.qc", document, tensors)
    assert "\x1b" not in str(refused(tmp_path / "forged.qc"))


# -- fuzz ------------------------------------------------------------------------------------------------------

WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "relu:out0",
    [],
    {},
    [[]],
    {"a": 1},
]


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every field, those of long tables by their first few rows."""
    found = [prefix] if prefix else []
    if isinstance(value, dict):
        rows: list[tuple[Any, Any]] = list(value.items())
    else:
        rows = list(enumerate(value)) if isinstance(value, list) else []
    for key, child in rows[:4] if len(rows) > 12 else rows:
        found.extend(paths(child, (*prefix, key)))
    return found


def put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def dropped(document: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        document = document[key]
    del document[path[-1]]


def loaded_or_refused(path: Path) -> Program | None:
    try:
        program: Program = qc.load(path)
    except LoadError:
        return None
    program.dump()
    return program


def test_every_field_dropped_or_of_another_type(parts: Parts, tmp_path: Path) -> None:
    """Each is refused, or it still is a sound program; nothing else is ever raised."""
    places = paths(parts.copy()[0])
    assert len(places) > 150
    chance = random.Random(1)
    told = 0
    for place in places:
        document, tensors = parts.copy()
        if chance.random() < 0.4:
            dropped(document, place)
        else:
            put(document, place, chance.choice(WRONG))
        put_together(tmp_path / "fuzzed.qc", document, tensors)
        told += loaded_or_refused(tmp_path / "fuzzed.qc") is None
    assert told > 0.7 * len(places)


@settings(max_examples=60)
@given(data=st.data())
def test_mutated_documents_are_refused_or_sound(data: st.DataObject, parts: Parts, tmp_path: Path) -> None:
    document, tensors = parts.copy()
    places = paths(document)
    for place in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3)):
        value = data.draw(st.one_of(st.sampled_from(WRONG), st.text(max_size=8), st.integers(), st.floats()))
        try:
            put(document, place, value)
        except (KeyError, IndexError, TypeError):
            continue
    text = document.get("text")
    if isinstance(text, str) and text and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        document["text"] = (
            text[:at] + data.draw(st.sampled_from(["%", "(", "[9]", '"', "\n", "&", "@x", "-1"])) + text[at:]
        )
    put_together(tmp_path / "fuzzed.qc", document, tensors)
    program = loaded_or_refused(tmp_path / "fuzzed.qc")
    if program is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            qc.convert(program)(images(1))
        except QuantcError:
            return
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return  # torch refuses a call that the text asks for, such as one with a negative size
