"""From a calibrated model to kernels, or to the Q/DQ form."""

from __future__ import annotations

import warnings

import pytest
import torch

from quantc.backends.x86 import X86
from quantc.flows.fx import (
    convert_fx,
    convert_to_reference_fx,
    get_default_qconfig_mapping,
    prepare_fx,
)
from tests.support.fx_small import batches, layers, prepared_layers


def test_it_runs_on_kernels_of_the_engine_that_torch_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_layers()
    assert convert_fx(prepared).target == "x86"
    monkeypatch.setattr(torch.backends.quantized, "engine", "qnnpack")
    on_qnnpack = convert_fx(prepared)
    assert on_qnnpack.target == "qnnpack"
    assert all(row.kernel for row in on_qnnpack.placed)


def test_the_reference_is_in_q_dq_form() -> None:
    prepared, x = prepared_layers(), batches()[0]
    reference = convert_to_reference_fx(prepared)
    targets = [str(node.target) for node in reference.graph.nodes]
    assert sum("quantized_decomposed.quantize_per_tensor" in target for target in targets) == 3
    assert not any(target.startswith("activation_post_process") for target in targets)
    step = float(prepared.activation_post_process_2.calculate_qparams()[0])
    assert float((reference(x) - convert_fx(prepared)(x)).abs().max()) <= 1.01 * step


def test_sums_that_a_processor_would_cut_off_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are for 7 bits, but what lies beyond takes the eighth: on AVX2 two products may then leave 16 bits."""
    prepared = prepared_layers()
    monkeypatch.setattr("quantc.targets.kernels.saturation.instruction_set_here", lambda: "avx2")
    with pytest.warns(UserWarning, match="sums can saturate in linear"):
        convert_fx(prepared)
    safe = prepare_fx(layers(), get_default_qconfig_mapping("x86"), (batches()[0],), backend_config=X86)
    for x in batches():
        safe(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_fx(safe)
