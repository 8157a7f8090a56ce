"""Quantizers written for torchao and ExecuTorch, unchanged: what quantc makes of them is what torchao makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

from quantc.errors import AnnotationError
from quantc.flows.executorch import to_executorch
from tests.support.oracle_models import SUBJECTS, Residual, Subject
from tests.support.oracles import Batches, decomposed, differences, placement, worst_op_error
from tests.support.pt2e_runs import captured, quantized, run

Make = Callable[[], Any]


def x86() -> Any:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as theirs

    return theirs.X86InductorQuantizer().set_global(theirs.get_default_x86_inductor_quantization_config())


def x86_dynamic() -> Any:
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as theirs

    config = theirs.get_default_x86_inductor_quantization_config(is_dynamic=True)
    return theirs.X86InductorQuantizer().set_global(config)


def xnnpack() -> Any:
    theirs = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    return theirs.XNNPACKQuantizer().set_global(theirs.get_symmetric_quantization_config(is_per_channel=True))


def xnnpack_dynamic() -> Any:
    theirs = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    config = theirs.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    return theirs.XNNPACKQuantizer().set_global(config)


def cadence() -> Any:
    """It derives the scale of a bias from those of input and weight, and goes by what strict export notes."""
    return pytest.importorskip("executorch.backends.cadence.aot.quantizer.quantizer").CadenceDefaultQuantizer()


def vulkan() -> Any:
    """It quantizes linear layers alone."""
    theirs = pytest.importorskip("executorch.backends.vulkan.quantizer.vulkan_quantizer")
    return theirs.VulkanQuantizer().set_global(theirs.get_symmetric_quantization_config())


QUANTIZERS: tuple[Make, ...] = (x86, x86_dynamic, xnnpack, xnnpack_dynamic, cadence, vulkan)
FAST = {(x86, "perceptron"), (xnnpack_dynamic, "chain"), (cadence, "perceptron"), (vulkan, "plain_convs")}
"""One of each kind; all others take longer, most of it in torchao."""
CASES = [
    pytest.param(
        make,
        subject,
        id=f"{make.__name__}-{subject.name}",
        marks=[] if (make, subject.name) in FAST else [pytest.mark.slow],
    )
    for make in QUANTIZERS
    for subject in SUBJECTS
    if (make, subject.name) != (cadence, "twice")  # torchao is wrong there: see the next test
]


@dataclass(frozen=True)
class Pair:
    """One model quantized by both, on the same calibration data."""

    ours: fx.GraphModule
    theirs: fx.GraphModule
    unseen: Batches


def by_torchao(model: nn.Module, quantizer: Any, batches: Batches, *, strict: bool = False) -> fx.GraphModule:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    converted: fx.GraphModule = convert_pt2e(
        run(prepare_pt2e(captured(model, batches, strict=strict), quantizer), batches)
    )
    return converted


def is_quantized(module: fx.GraphModule) -> bool:
    return any(decomposed(node, "dequantize") for node in module.graph.nodes)


@pytest.mark.parametrize(("make", "subject"), CASES)
def test_their_quantizers_on_our_engine(make: Make, subject: Subject) -> None:
    """Every operand is quantized by both or by neither, with the same bits; results are equal, op by op and whole."""
    strict, batches, unseen = make is cadence, subject.batches(4, seed=1), subject.batches(2, seed=2)
    theirs = by_torchao(subject.with_norms(), make(), batches, strict=strict)
    if not is_quantized(theirs):
        with pytest.raises(AnnotationError, match="annotated nothing"):
            quantized(subject.with_norms(), make(), batches, strict=strict)
        return
    ours = quantized(subject.with_norms(), make(), batches, strict=strict)
    assert differences(placement(ours), placement(theirs)) == {}
    error, name = worst_op_error(ours, theirs, unseen[0])
    assert error <= 1e-5, name
    for batch in unseen:
        assert torch.equal(ours(*batch), theirs(*batch))


def bias_scales(module: fx.GraphModule) -> list[tuple[float, float]]:
    """Of each linear layer: the scale of its bias, and the product of those of its input and weight."""
    layers = [node.args for node in module.graph.nodes if node.target is torch.ops.aten.linear.default]
    read: list[list[Any]] = [[operand.args[1] for operand in args] for args in layers]
    return [(bias, x * weight) for x, weight, bias in read]


def test_a_bias_that_two_products_read_has_the_scale_of_each() -> None:
    """torchao gives it one: that of the first product, which is wrong for the second."""
    subject = next(subject for subject in SUBJECTS if subject.name == "twice")
    batches = subject.batches(2, seed=1)
    ours = quantized(subject.with_norms(), cadence(), batches, strict=True)
    assert all(found == pytest.approx(expected) for found, expected in bias_scales(ours))
    theirs = by_torchao(subject.with_norms(), cadence(), batches, strict=True)
    assert not all(found == pytest.approx(expected) for found, expected in bias_scales(theirs))


def test_the_comparison_can_fail() -> None:
    """Another config is another placement."""
    theirs = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    subject = next(subject for subject in SUBJECTS if subject.name == "perceptron")
    batches = subject.batches(2, seed=1)
    by_tensor = theirs.XNNPACKQuantizer().set_global(theirs.get_symmetric_quantization_config(is_dynamic=True))
    ours = quantized(subject.with_norms(), xnnpack_dynamic(), batches)
    assert differences(placement(ours), placement(quantized(subject.with_norms(), by_tensor, batches)))


def residual() -> tuple[nn.Module, Batches]:
    subject = Subject("residual", Residual, (2, 3, 16, 16))
    return subject.with_norms(), subject.batches(3, seed=1)


@pytest.mark.slow
def test_inductor_compiles_the_result_of_x86_to_int8_kernels() -> None:
    import torch._inductor.config
    from torch._inductor.utils import run_and_get_code

    model, batches = residual()
    converted = quantized(model, x86(), batches)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        result, code = run_and_get_code(torch.compile(converted), *batches[0])
        expected = converted(*batches[0])
    calls = re.findall(r"torch\.ops\.onednn\.(\w+)", "\n".join(code))
    assert {"qconv2d_pointwise", "qlinear_pointwise"} <= set(calls)
    assert "convolution" not in "".join(code).replace("qconv", "")
    assert torch.allclose(result, expected, atol=2 * float(expected.abs().max()) / 255)


@pytest.mark.slow
def test_the_delegate_takes_the_result_of_xnnpack() -> None:
    runtime = pytest.importorskip("executorch.runtime").Runtime.get()
    model, batches = residual()
    converted = quantized(model, xnnpack(), batches)
    program = to_executorch(converted, batches[0])
    calls = [str(node.target) for node in program.exported_program().graph.nodes if node.op == "call_function"]
    assert sum("executorch_call_delegate" in call for call in calls) == 1
    assert not [call for call in calls if "conv" in call or "linear" in call or "addmm" in call]
    method = runtime.load_program(program.buffer).load_method("forward")
    with torch.no_grad():
        expected = converted(*batches[0])
    (result,) = method.execute(list(batches[0]))
    step = float(expected.abs().max()) / 127
    assert float((result - expected).abs().max()) <= 2 * step
