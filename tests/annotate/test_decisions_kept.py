"""What is decided is carried out, or refused by name: plans that text loses, bits of scales, axes of observers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import AnnotationError, SpecError
from quantc.flows.fake_quantize import FakeQuantize
from quantc.flows.observers import MinMaxObserver, PerChannelMinMaxObserver
from quantc.flows.pt2e import QuantizationAnnotation, QuantizationSpec, Quantizer, convert_pt2e, prepare_pt2e
from quantc.flows.pt2e.group_observers import plain_observer
from quantc.ir.program import Program, Stage
from quantc.qat.removal import fake_quantizers
from quantc.spec.numerics import to_significant_bits
from quantc.text.digests import constants
from tests.support.hand_quantizers import X, linears, prepared


def again(program: Program) -> Program:
    """As a text gives it that was written before texts had plans."""
    return qc.parse(program.dump(plan=False), constants(program))


# -- text ----------------------------------------------------------------------------------------------------------------


def test_a_parsed_program_without_its_plan_is_refused() -> None:
    made = prepared()
    for verb in (lambda: qc.calibrate(again(made), [X], progress="silent"), lambda: qc.convert(again(made))):
        with pytest.raises(AnnotationError, match="has no plan") as caught:
            verb()
        assert "qc.load" in str(caught.value.advice)
    qc.calibrate(made, [X], progress="silent")
    with pytest.raises(AnnotationError, match=r"has no plan, so qc.convert would"):
        qc.convert(again(made))
    quantized = qc.convert(made)
    parsed = again(quantized)
    assert torch.equal(parsed(X), quantized(X)), "it can be run, as the text says"
    for target in ("x86", "qnnpack", "onnx", "executorch"):
        with pytest.raises(AnnotationError, match=r"has no plan, so qc.lower would"):
            qc.lower(parsed, target)
    for engine in ("onnxruntime", "auto"):
        with pytest.raises(AnnotationError, match=r"has no plan, so qc.lower would"):
            qc.lower(parsed, "x86", engine=engine)


def test_what_needs_no_plan_is_read_from_text() -> None:
    made = prepared()
    qc.calibrate(made, [X], progress="silent")
    program = qc.capture(linears(), (X,))
    assert qc.prepare(again(program), "x86").stage >= Stage.SHARED
    integer = qc.convert(made, to="integer")
    lowered = qc.lower(again(integer), "x86")
    assert lowered.placed
    assert all(row.kernel for row in lowered.placed)
    nothing = qc.prepare(program, "x86", config=qc.QuantConfig().set_all(qc.FLOAT), allow_empty=True)
    assert torch.equal(qc.convert(nothing)(X), program(X)), "nothing quantized on purpose is no plan that was lost"


# -- training ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observe", ["lsq", "lsq-plus"])
@pytest.mark.parametrize("bits", [3, 8])
def test_learned_scales_have_the_bits_they_are_given(observe: str, bits: int) -> None:
    act, weight = (
        qc.UINT8.but(observe=observe, scale_bits=bits),
        qc.INT8_NARROW_WEIGHT.but(observe="lsq", scale_bits=bits),
    )
    made = prepared(qat=True, config=qc.QuantConfig().set_all(act).set_all(weight))
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        made(X).square().mean().backward()
        optimizer.step()
    learned: list[Any] = [fake for fake in fake_quantizers(made.root) if hasattr(fake, "started")]
    assert learned
    for fake in learned:
        assert fake.scale.grad is not None
        assert bool((fake.scale.grad != 0).any()), "it goes on learning"
    program = qc.convert(made)
    for qparams in program.plan.qparams.values():
        assert torch.equal(qparams.scale, to_significant_bits(qparams.scale, bits))
    with torch.no_grad():
        assert torch.equal(program(X), made.eval()(X))


# -- observers of others -------------------------------------------------------------------------------------------------


class RowRange(nn.Module):
    """An observer of the user's own: scales along an axis, and nothing in its name that says so."""

    with_args: Any = classmethod(PerChannelMinMaxObserver.with_args.__func__)  # type: ignore[attr-defined]

    def __init__(
        self,
        dtype: torch.dtype = torch.int8,
        qscheme: Any = torch.per_channel_symmetric,
        quant_min: int = -127,
        quant_max: int = 127,
        ch_axis: int = 0,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__()
        self.dtype, self.qscheme, self.quant_min, self.quant_max = dtype, qscheme, quant_min, quant_max
        self.ch_axis, self.is_dynamic, self.largest = ch_axis, is_dynamic, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.largest = x.detach().abs().amax([axis for axis in range(x.dim()) if axis != self.ch_axis])
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        scale = self.largest.clamp(min=1e-8) / 127
        return scale, torch.zeros_like(scale, dtype=torch.int64)


class Deeper(PerChannelMinMaxObserver):
    """One that hands its arguments on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Forgets(RowRange):
    def __init__(self, ch_axis: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def weight_spec(observer: Any, axis: int = 1) -> QuantizationSpec:
    return QuantizationSpec(
        dtype=torch.int8,
        quant_min=-127,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=axis,
        observer_or_fake_quant_ctr=observer,
    )


@pytest.mark.parametrize(
    "observer",
    [RowRange, Deeper, PerChannelMinMaxObserver, FakeQuantize.with_args(observer=PerChannelMinMaxObserver)],
    ids=lambda kind: getattr(kind, "__name__", "FakeQuantize"),
)
def test_an_observer_keeps_its_axis_whatever_it_is_called(observer: Any) -> None:
    made: Any = plain_observer(weight_spec(observer))
    made(torch.randn(3, 5))
    assert made.calculate_qparams()[0].shape == (5,)
    found = made if hasattr(made, "ch_axis") else made.activation_post_process
    assert found.ch_axis == 1


class Whole(RowRange):
    def __init__(self, dtype: torch.dtype, qscheme: Any, quant_min: int, quant_max: int, is_dynamic: bool) -> None:
        super().__init__(dtype, qscheme, quant_min, quant_max, 0, is_dynamic)


@pytest.mark.parametrize("observer", [Forgets, Whole], ids=lambda kind: kind.__name__)
def test_an_observer_that_has_no_axis_is_refused(observer: Any) -> None:
    with pytest.raises(AnnotationError, match=f"{observer.__name__} is to have a scale for each channel of axis 1"):
        plain_observer(weight_spec(observer))
    with pytest.raises(SpecError, match="MinMaxObserver does not go with"):
        plain_observer(weight_spec(MinMaxObserver))


class ByColumns(Quantizer):
    """Weights of linears with a scale for each column, by an observer of the user's own."""

    def annotate(self, model: Any) -> Any:
        act = QuantizationSpec(
            dtype=torch.int8,
            quant_min=-128,
            quant_max=127,
            qscheme=torch.per_tensor_affine,
            observer_or_fake_quant_ctr=MinMaxObserver,
        )
        for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
            x, weight = node.args[:2]
            node.meta["quantization_annotation"] = QuantizationAnnotation(
                {x: act, weight: weight_spec(RowRange)}, act, _annotated=True
            )
        return model

    def validate(self, model: Any) -> None: ...


def test_an_observer_of_the_users_own_is_converted_along_its_axis() -> None:
    model = nn.Sequential(nn.Linear(8, 3)).eval()
    module = prepare_pt2e(torch.export.export(model, (X,)).module(), ByColumns())
    module(X)
    converted: Any = convert_pt2e(module)
    calls = [node for node in converted.graph.nodes if "dequantize_per_channel" in str(node.target)]
    assert [node.args[3] for node in calls] == [1]
    assert converted._scale_0.shape == (8,)
    weight = model.get_parameter("0.weight").detach()
    step = weight.abs().amax(0) / 127
    levels = torch.ops.quantized_decomposed.quantize_per_channel(
        weight, step, torch.zeros(8, dtype=torch.int64), 1, -127, 127, torch.int8
    )
    assert torch.equal(converted._frozen_param0, levels)
