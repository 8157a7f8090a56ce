"""XNNPACKQuantizer and its config, under the names of ExecuTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.flows.pt2e import xnnpack_quantizer as ours
from tests.support.pt2e_quantizers import converted, count, described

theirs: Any = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
X = (torch.randn(4, 6, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("is_per_channel", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_configs_are_executorchs(is_per_channel: bool, is_dynamic: bool) -> None:
    mine = ours.get_symmetric_quantization_config(is_per_channel, False, is_dynamic)
    other = theirs.get_symmetric_quantization_config(is_per_channel, False, is_dynamic)
    assert described(mine.input_activation) == described(other.input_activation)
    assert described(mine.output_activation) == described(other.output_activation)
    assert described(mine.weight) == described(other.weight)


def test_ranges_can_be_given() -> None:
    config = ours.get_symmetric_quantization_config(act_qmin=0, act_qmax=127, weight_qmin=-7, weight_qmax=7)
    act, weight = config.input_activation, config.weight
    assert act is not None
    assert weight is not None
    assert (act.quant_min, act.quant_max, weight.quant_min, weight.quant_max) == (0, 127, -7, 7)
    assert config not in ours.known_configs()


def test_every_default_config_is_known_once() -> None:
    known = ours.known_configs()
    assert len(known) == 8
    assert len({id(config) for config in known}) == 8
    assert ours.get_symmetric_quantization_config(is_qat=True) in known


@pytest.mark.parametrize(("is_per_channel", "op"), [(False, "per_tensor"), (True, "per_channel")])
def test_weights_have_one_scale_or_one_for_each_channel(is_per_channel: bool, op: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3)).eval()
    quantizer = ours.XNNPACKQuantizer().set_global(ours.get_symmetric_quantization_config(is_per_channel))
    made = converted(model, X, quantizer)
    assert count(made, "dequantize_per_channel.default") == is_per_channel
    (linear,) = (node for node in made.graph.nodes if node.target is torch.ops.aten.linear.default)
    assert op in str(linear.args[1].target)
    assert float((made(*X) - model(*X)).detach().abs().max()) < 0.05


def test_no_scale_is_smaller_than_the_delegate_takes() -> None:
    tiny = (1e-7 * X[0],)
    quantizer = ours.XNNPACKQuantizer().set_global(ours.get_symmetric_quantization_config())
    made = converted(nn.Sequential(nn.Linear(6, 3, bias=False)).eval(), tiny, quantizer)
    scales = [node.args[1] for node in made.graph.nodes if "quantize_per_tensor" in str(node.target)]
    assert min(scales) == ours.EPS
