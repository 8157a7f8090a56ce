"""X86Quantizer and its default config, under the names of torchao."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as theirs

from quantc.flows.pt2e import x86_inductor_quantizer as ours
from tests.support.pt2e_quantizers import converted, count, described

X = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("reduce_range", [False, True])
def test_configs_are_torchaos(is_dynamic: bool, reduce_range: bool) -> None:
    mine = ours.get_default_x86_inductor_quantization_config(False, is_dynamic, reduce_range)
    other = theirs.get_default_x86_inductor_quantization_config(False, is_dynamic, reduce_range)
    assert described(mine.input_activation) == described(other.input_activation)
    assert described(mine.weight) == described(other.weight)


def test_results_stay_float_where_scales_are_found_as_it_runs() -> None:
    dynamic = ours.get_default_x86_inductor_quantization_config(is_dynamic=True)
    assert dynamic.output_activation is None
    static = ours.get_default_x86_inductor_quantization_config()
    assert static.output_activation == static.input_activation


def test_training_rounds_weights_by_channel() -> None:
    config = ours.get_default_x86_inductor_quantization_config(is_qat=True)
    assert config.is_qat
    weight: Any = config.weight
    fake = weight.observer_or_fake_quant_ctr.with_args(
        dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_channel_symmetric, ch_axis=0
    )()
    rows = torch.tensor([[1.0, 0.3], [100.0, 30.0]])
    made = fake(rows)
    assert float((made[0] - rows[0]).abs().max()) <= 0.5 / 127
    assert float((made[1] - rows[1]).abs().max()) <= 50 / 127


def test_the_same_call_gives_the_same_config() -> None:
    """Ops that are told the same twice share observers: their specs are one object."""
    first, again = (ours.get_default_x86_inductor_quantization_config() for _ in range(2))
    assert first is again
    assert first in ours.known_configs()


def test_names_of_torchao_set_what_they_set_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 3))).eval()
    config = ours.get_default_x86_inductor_quantization_config()
    for quantizer, products in (
        (ours.X86Quantizer().set_global(config), 2),
        (ours.X86Quantizer().set_global(config).set_module_name_qconfig("1", None), 1),
        (ours.X86Quantizer().set_module_name_qconfig("1", config), 1),
        (ours.X86Quantizer().set_function_type_qconfig(nn.functional.linear, config), 2),
        (ours.X86Quantizer().set_module_type_qconfig(nn.Linear, config), 2),
    ):
        assert count(converted(model, X, quantizer), "dequantize_per_channel.default") == products
    assert ours.X86InductorQuantizer is ours.X86Quantizer
