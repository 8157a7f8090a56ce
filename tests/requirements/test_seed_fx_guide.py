"""The code of the guide to FX graph mode: as it stands there, but for the line that imports its functions."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.flows.fx import (
    QConfigMapping,
    convert_fx,
    default_dynamic_qconfig,
    get_default_qconfig,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.fx.observed_module import ObservedGraphModule
from tests.support.fx_custom_modules import (
    DynamicQuantNonTraceable,
    FP32NonTraceable,
    M,
    ObservedNonTraceable,
    StaticQuantNonTraceable,
    worst_error,
)

SUBMODULE = "non_traceable_submodule"


@pytest.fixture
def model() -> M:
    torch.manual_seed(0)
    return M().eval()


@pytest.fixture
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 8) for _ in range(4)]


IMPORTS = """
from quantc.flows.fx import QConfigMapping, convert_fx, prepare_fx
"""

ONLY_WHAT_NEEDS_IT = """
qconfig_mapping = QConfigMapping().set_global(qconfig)
model_fp32.traceable_submodule = \\
  prepare_fx(model_fp32.traceable_submodule, qconfig_mapping, example_inputs)
"""

SKIP = """
qconfig_mapping = QConfigMapping.set_global(qconfig)

prepare_custom_config_dict = {
    # option 1
    "non_traceable_module_name": "non_traceable_submodule",
    # option 2
    "non_traceable_module_class": [MNonTraceable],
}
model_prepared = prepare_fx(
    model_fp32,
    qconfig_mapping,
    example_inputs,
    prepare_custom_config_dict=prepare_custom_config_dict,
)
"""

REFACTORED = """
def transpose_for_scores(self, x):
    new_x_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)
    x = x.view(new_x_shape)
    return x.permute(0, 2, 1, 3)
"""

STATIC_1 = """
# post training static quantization or
# quantization aware training (that produces a statically quantized module)v
prepare_custom_config_dict = {
    "float_to_observed_custom_module_class": {
        "static": {
            FP32NonTraceable: ObservedNonTraceable,
        }
    },
}

model_prepared = prepare_fx(
    model_fp32,
    qconfig_mapping,
    example_inputs,
    prepare_custom_config_dict=prepare_custom_config_dict)
"""

STATIC_2 = """
convert_custom_config_dict = {
    "observed_to_quantized_custom_module_class": {
        "static": {
            ObservedNonTraceable: StaticQuantNonTraceable,
        }
    },
}
model_quantized = convert_fx(
    model_prepared,
    convert_custom_config_dict)
"""

DYNAMIC_1 = """
prepare_custom_config_dict = {
    "non_traceable_module_class": [
        FP32NonTraceable
    ]
}
"""

DYNAMIC_2 = """
# The example is for post training quantization
model_fp32.eval()
model_prepared = prepare_fx(
    model_fp32,
    qconfig_mapping,
    example_inputs,
    prepare_custom_config_dict=prepare_custom_config_dict)

convert_custom_config_dict = {
    "observed_to_quantized_custom_module_class": {
        "dynamic": {
            FP32NonTraceable: DynamicQuantNonTraceable,
        }
    },
}
model_quantized = convert_fx(
    model_prepared,
    convert_custom_config_dict)
"""


def run(namespace: dict[str, Any], *blocks: str) -> dict[str, Any]:
    for block in (IMPORTS, *blocks):
        exec(compile(block, "guide", "exec"), namespace)  # noqa: S102 - the code above
    return namespace


@pytest.fixture
def guide(model: M, batches: list[Tensor]) -> dict[str, Any]:
    """What the guide leaves to its reader."""
    return {
        "model_fp32": model,
        "qconfig": get_default_qconfig("x86"),
        "example_inputs": (batches[0],),
        "FP32NonTraceable": FP32NonTraceable,
        "MNonTraceable": FP32NonTraceable,  # the guide calls it by both names
        "ObservedNonTraceable": ObservedNonTraceable,
        "StaticQuantNonTraceable": StaticQuantNonTraceable,
        "DynamicQuantNonTraceable": DynamicQuantNonTraceable,
    }


def test_the_guide_quantizes_only_what_needs_it(guide: dict[str, Any], batches: list[Tensor]) -> None:
    model = nn.Module()
    model.traceable_submodule = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    done = run(guide | {"model_fp32": model}, ONLY_WHAT_NEEDS_IT)
    assert isinstance(done["model_fp32"].traceable_submodule, ObservedGraphModule)


def test_the_guide_skips_what_cannot_be_traced(guide: dict[str, Any], model: M, batches: list[Tensor]) -> None:
    done = run(guide, SKIP)
    for x in batches:
        done["model_prepared"](x)
    assert worst_error(convert_fx(done["model_prepared"]), model, batches) < 0.05


def test_the_guide_refactors() -> None:
    namespace = run({}, REFACTORED)

    class Scores(nn.Module):
        num_attention_heads, attention_head_size = 2, 4
        transpose_for_scores = namespace["transpose_for_scores"]

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.transpose_for_scores(self.linear(x))

    torch.manual_seed(0)
    model, x = Scores().eval(), torch.randn(2, 3, 8)
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (x,))
    prepared(x)
    assert worst_error(convert_fx(prepared), model, [x]) < 0.05


def test_the_guide_writes_custom_modules(guide: dict[str, Any], model: M, batches: list[Tensor]) -> None:
    done = run(guide | {"qconfig_mapping": get_default_qconfig_mapping()}, STATIC_1)
    for x in batches:
        done["model_prepared"](x)
    done = run(done, STATIC_2)
    assert worst_error(done["model_quantized"], model, batches) < 0.05


def test_the_guide_writes_dynamic_custom_modules(guide: dict[str, Any], model: M, batches: list[Tensor]) -> None:
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = run(guide | {"qconfig_mapping": mapping}, DYNAMIC_1, DYNAMIC_2)
    assert type(done["model_quantized"].get_submodule(SUBMODULE)) is DynamicQuantNonTraceable
    assert worst_error(done["model_quantized"], model, batches) < 0.05
