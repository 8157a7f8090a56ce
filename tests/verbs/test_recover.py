"""The verb: what it takes and refuses, what it leaves alone, and that what it found is kept in files and text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import CalibrationError, InputError, PipelineError
from quantc.ir.program import Program
from quantc.text.digests import constants
from tests.support.recovery import linear_case


def bits(program: Program) -> dict[str, list[float]]:
    return {str(site): tensor.flatten().tolist() for site, tensor in program.plan.fitted.items()}


def converted_bits(program: Program) -> dict[str, list[float]]:
    root = qc.convert(program).root
    return {name: tensor.double().flatten().tolist() for name, tensor in root.state_dict().items()}


def test_it_gives_another_program_that_computes_what_it_did() -> None:
    case = linear_case()
    program = case.prepared()
    before = program.dump("text")
    better = qc.recover(program, progress="silent")
    assert program.dump("text") == before
    assert program.plan.fitted == {}
    assert torch.equal(better(case.batches[0]), program(case.batches[0]))
    fitted, plain = (qc.convert(each)(case.batches[1]) for each in (better, program))
    error = [float((each - program(case.batches[1])).detach().square().mean()) for each in (fitted, plain)]
    assert error[0] < error[1]
    assert better.log[-1].judgments


def test_progress_counts_layers() -> None:
    told: list[tuple[int, int | None]] = []
    qc.recover(linear_case().prepared(), "round", progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told if done] == [1]


def test_hooks_are_called() -> None:
    timing = qc.hooks.Timing()
    qc.recover(linear_case().prepared(), "rescale,correct-bias", progress="silent", hooks=[timing])
    assert "rescale" in str(timing)


def test_what_was_fitted_is_in_files_and_text(tmp_path: Path) -> None:
    case = linear_case()
    better = qc.recover(case.prepared(), progress="silent")
    path = tmp_path / "fitted.qc"
    better.save(path)
    loaded = qc.load(path)
    assert isinstance(loaded, Program)
    parsed = qc.parse(better.dump("text"), constants(better))
    assert bits(loaded) == bits(parsed) == bits(better)
    assert converted_bits(loaded) == converted_bits(better)
    assert better.dump("text") == loaded.dump("text")
    assert parsed.dump("text") == better.dump("text")


def test_what_it_refuses() -> None:
    case = linear_case()
    captured = qc.capture(nn.Sequential(case.layer).eval(), (case.batches[0],))
    with pytest.raises(CalibrationError, match="was not prepared"):
        qc.recover(captured)
    prepared = qc.prepare(captured, "x86")
    with pytest.raises(CalibrationError, match="nothing was collected of what the layers of"):
        qc.recover(prepared)
    with pytest.raises(CalibrationError, match="was prepared to be trained"):
        qc.recover(qc.prepare(captured, "x86", qat=True))
    ready = case.prepared()
    with pytest.raises(PipelineError, match="eliminate-dead is no pass that fits or transforms weights"):
        qc.recover(ready, "round,eliminate-dead")
    with pytest.raises(qc.QuantcError, match="is already converted"):
        qc.recover(qc.convert(ready))
    for batches in ([(case.batches[0], torch.zeros(1))] * 2, [case.batches[0], (case.batches[0], torch.zeros(1))]):
        with pytest.raises(InputError, match="inputs=0"):
            qc.recover(ready, batches=batches, progress="silent")
    with pytest.raises(qc.QuantcError):
        qc.recover(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_quantize_fits_where_asked() -> None:
    case = linear_case()
    model = nn.Sequential(case.layer).eval()
    plain, again, fitted, text = (
        qc.quantize(model, (case.batches[0],), case.batches, backend="x86", recover=recover)
        for recover in (False, False, True, "correct-bias")
    )
    assert converted_bits(plain.prepared) == converted_bits(again.prepared)
    assert plain.report.recovery is None
    assert fitted.report.recovery is not None
    assert [name for name, _ in fitted.report.recovery.passes] == ["rescale", "round", "correct-bias"]
    assert text.report.recovery is not None
    assert [name for name, _ in text.report.recovery.passes] == ["correct-bias"]
    assert "kept" in str(fitted.report)
    data = json.loads(fitted.report.to_json())
    assert data["recovery"][1]["sites"][0]["fate"] == "kept"
    assert "weights fitted to the data" in fitted.report.to_html()
    assert [step.name for step in fitted.report.steps] == [
        "capture",
        "prepare",
        "calibrate",
        "recover",
        "convert",
        "compare",
    ]


def test_quantize_refuses_passes_that_are_none() -> None:
    case = linear_case()
    model = nn.Sequential(case.layer).eval()
    for recover, message in ((["round"], "is no pipeline"), ("", "no passes are named")):
        with pytest.raises(PipelineError, match=message):
            qc.quantize(model, (case.batches[0],), case.batches, recover=recover)  # type: ignore[arg-type]


def test_one_batch_is_a_warning_as_nothing_can_be_judged() -> None:
    case = linear_case()
    model = nn.Sequential(case.layer).eval()

    def warned(count: int, recover: bool) -> bool:
        found = qc.quantize(model, (case.batches[0],), case.batches[:count], recover=recover)
        return any("there was one batch" in text for text in found.report.warnings)

    assert not warned(2, recover=True)
    assert not warned(1, recover=False)
    with pytest.warns(UserWarning, match="there was one batch"):
        assert warned(1, recover=True)


def test_none_corrects_biases_where_the_mode_calibrates() -> None:
    case = linear_case()
    model = nn.Sequential(case.layer).eval()
    found = qc.quantize(model, (case.batches[0],), case.batches, backend="qnnpack", recover=None)
    assert found.report.recovery is not None
    assert [name for name, _ in found.report.recovery.passes] == ["correct-bias"]
    assert [halves.statistics for halves in found.prepared.plan.collected.values()] == ["moments"]
    assert found.report.recovery.passes[0][1][0].fate == "kept"
    dynamic = qc.quantize(model, (case.batches[0],), None, backend="x86", mode="dynamic", recover=None)
    assert dynamic.report.recovery is None


def test_quantize_without_data_cannot_fit() -> None:
    def run(batches: list[Tensor] | None) -> None:
        model = nn.Sequential(nn.Linear(4, 4)).eval()
        qc.quantize(model, (torch.zeros(1, 4),), batches, backend="x86", mode="dynamic", recover=True)

    with pytest.raises(CalibrationError, match="weights are fitted to what their layers read"):
        run(None)


@pytest.mark.parametrize("form", ["as it is", "file", "text"])
def test_new_weights_are_not_taken_for_those_that_values_were_fitted_to(tmp_path: Path, form: str) -> None:
    """In place, by a state dict, or through a file: fitted values of other weights would replace them without a word."""
    better = qc.recover(linear_case().prepared(), progress="silent")
    if form == "file":
        better.save(tmp_path / "fitted.qc")
        loaded = qc.load(tmp_path / "fitted.qc")
        assert isinstance(loaded, Program)
        better = loaded
    elif form == "text":
        better = qc.parse(better.dump("text"), constants(better))
    old = {name: tensor.clone() for name, tensor in better.state_dict().items()}
    better.load_state_dict({name: -tensor for name, tensor in old.items()})
    for act in (qc.convert, qc.recover):
        with pytest.raises(CalibrationError, match=r"linear:in1 reads has changed since qc.recover") as caught:
            act(better)
        assert "call qc.recover again" in str(caught.value)
    better.load_state_dict(old)
    qc.convert(better)
    with torch.no_grad():
        next(iter(better.root.parameters())).view(-1)[0] += 1
    with pytest.raises(CalibrationError, match="has changed since"):
        qc.convert(better)


def test_the_text_says_what_values_were_fitted_to() -> None:
    better = qc.recover(linear_case().prepared(), progress="silent")
    text, known = better.dump("text"), next(iter(better.plan.fitted_to.values()))
    part = f' {{to="{known}"}}'
    assert part in text
    for wrong in (' {to="no digest"}', " {to=3}", ' {of="01234567"}'):
        with pytest.raises(qc.QuantcError):
            qc.parse(text.replace(part, wrong), constants(better))
    older = qc.parse(text.replace(part, ""), constants(better))
    assert len(older.plan.fitted_to) < len(better.plan.fitted_to)
    assert converted_bits(older) == converted_bits(better)
