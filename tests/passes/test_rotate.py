"""rotate: hidden states are turned, so that no channel is much larger than the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.hooks import Guard, Truth, Verify
from quantc.passes.rotate import Rotate
from quantc.pipeline.pipeline import Pipeline
from tests.support.streams import TOKENS, DecomposedRms, Language, captured, shaken


def test_it_keeps_the_numbers_and_does_nothing_the_second_time() -> None:
    program = captured(shaken(Language(nn.LayerNorm)).float(), TOKENS)
    steps = Pipeline((Rotate(),))
    once = steps.run(program, [Truth(), Verify(), Guard()])
    text = once.dump()
    assert [entry.changed for entry in once.log[-1:]] == [True]
    assert [each.fate for each in once.log[-1].judgments].count("kept") == 3
    steps.run(once, [Truth(), Verify()])
    assert [entry.changed for entry in once.log[-1:]] == [False]
    assert once.dump() == text


def test_its_text_form_has_the_seed() -> None:
    assert str(Pipeline.parse("rotate{seed=3 tied=untie}")) == "rotate{seed=3 tied=untie}"
    programs = [captured(shaken(Language(nn.LayerNorm)), TOKENS) for _ in range(3)]
    texts = [Pipeline((Rotate(seed=seed),)).run(each).dump() for seed, each in zip((0, 0, 1), programs, strict=True)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("norm", [nn.LayerNorm, DecomposedRms])
def test_int8_gains_where_channels_are_much_larger_than_others(norm: type[nn.Module]) -> None:
    """Measured by the quantized program itself, beside the same without the pass."""
    model = shaken(Language(norm)).float()
    with torch.no_grad():
        model.get_parameter("table.weight")[:, [3, 8]] *= 60
    batches = [(torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(seed)),) for seed in range(8)]
    float_program = captured(model, batches[0][0])
    found = []
    for program in (float_program, Pipeline((Rotate(),)).run_on_copy(float_program)):
        prepared = qc.prepare(program, "x86")
        qc.calibrate(prepared, batches[:4])
        quantized = qc.convert(prepared)
        pairs = [(float_program(*batch).detach(), quantized(*batch).detach()) for batch in batches[4:]]
        noise = sum(float((one - other).square().sum()) for one, other in pairs)
        found.append(10 * torch.log10(torch.tensor(sum(float(one.square().sum()) for one, _ in pairs) / noise)))
    assert float(found[1] - found[0]) > 4, found
