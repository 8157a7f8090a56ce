"""Run-time scales in Q/DQ form: the numbers of torch's ops, what is refused, and where programs go from here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.annotate.annotator import Annotator
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError, CalibrationError, DataError, InputError
from quantc.ir.decisions import FLOAT
from quantc.ir.program import Program
from quantc.qdq.ops import is_choice
from quantc.spec.formats import Timing
from quantc.spec.spec import FP8_E4M3_WEIGHT, INT8_DYNAMIC, INT16, UINT8, UINT8_DYNAMIC, UINT8_TOKEN, QuantSpec
from tests.support import fake_quantized as fake

SEVEN_BITS = UINT8_DYNAMIC.but(qmax=127, eps=2.0**-14)


pytestmark = pytest.mark.usefixtures("no_grad")


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), *more, nn.Linear(24, 8)).eval()


def dynamic(model: nn.Module, x: Any, spec: QuantSpec = SEVEN_BITS, **how: Any) -> Program:
    return qc.quantize(model, (x,), config=QuantConfig().set_all(spec), **how).program


# -- numbers -----------------------------------------------------------------------------------------------------

LAWS = settings(max_examples=30)
SHAPES = [(16,), (1, 16), (5, 16), (2, 3, 16), (2, 1, 3, 16)]


@LAWS
@given(
    shape=st.sampled_from(SHAPES),
    exponent=st.integers(-30, 30),
    shift=st.floats(-4, 4),
    qmax=st.sampled_from([255, 127]),
    eps=st.sampled_from([2.0**-12, 2.0**-14, 2.0**-23]),
    by_token=st.booleans(),
    seed=st.integers(0, 10),
)
def test_a_layer_reads_what_torchs_observer_and_ops_make_of_its_input(
    shape: tuple[int, ...], exponent: int, shift: float, qmax: int, eps: float, by_token: bool, seed: int
) -> None:
    """For inputs of any size and place, far from zero or below the smallest scale."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=generator) + shift) * 2.0**exponent
    layer = nn.Linear(16, 6).eval()
    spec = UINT8_DYNAMIC.but(qmax=qmax, eps=eps, granularity="per-token" if by_token else "per-tensor")
    find = fake.by_token if by_token else fake.as_it_comes
    right = F.linear(find(x, qmax=qmax, eps=eps), fake.weight_by_channel(layer.weight), layer.bias)
    assert torch.equal(dynamic(layer, x, spec, reduce_range="no")(x), right)


@pytest.mark.parametrize("scheme", ["affine", "symmetric"])
@pytest.mark.parametrize("granularity", ["per-tensor", "per-token"])
def test_symmetric_scales_are_about_the_middle(scheme: str, granularity: str) -> None:
    layer, x = nn.Linear(16, 16, bias=False).eval(), torch.randn(4, 16)
    layer.weight.data = torch.eye(16) * 127
    spec = UINT8_DYNAMIC.but(scheme=scheme, granularity=granularity)
    found = dynamic(layer, x, spec)(x) / 127
    farthest = x.abs().amax(-1, keepdim=True) if granularity == "per-token" else x.abs().amax()
    steps = 255 if scheme == "symmetric" else 255 * 0.5
    assert float((found - x).abs().max() / farthest.max()) <= 2 / steps
    assert float((found - x).abs().max()) > 0


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize("op", ["matmul", "linear"])
def test_products_of_two_activations_are_dynamic_where_they_are_named(backend: str, op: str) -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.matmul(x, y.transpose(-1, -2)) if op == "matmul" else F.linear(x, y)

    x, y = torch.randn(3, 5, 16), torch.randn(7, 16)
    model = Product().eval()
    swept = QuantConfig().set_all(UINT8_DYNAMIC)
    with pytest.raises(AnnotationError, match="nothing was quantized") as caught:
        qc.quantize(model, (x, y), backend=backend, config=swept)
    assert "names the op" in str(caught.value.where)
    result = qc.quantize(model, (x, y), backend=backend, config=QuantConfig().set_op(op, UINT8_DYNAMIC))
    assert torch.equal(result(x, y), model(fake.as_it_comes(x), fake.as_it_comes(y)))
    named = QuantConfig().set_op(op, UINT8_TOKEN)
    if op == "linear":  # the rows of both are what is summed over
        assert torch.equal(
            qc.quantize(model, (x, y), backend=backend, config=named)(x, y),
            model(fake.by_token(x), fake.by_token(y)),
        )
        return
    with pytest.raises(AnnotationError, match="adds up rows of transpose, which per-token gives different scales"):
        qc.quantize(model, (x, y), backend=backend, config=named)


# -- NaN, infinity, nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("model", [layers(), layers(nn.LayerNorm(24)), nn.LSTM(16, 8).eval(), nn.GRUCell(16, 8).eval()])
def test_what_shares_a_scale_with_nan_is_not_finite(model: nn.Module, bad: float) -> None:
    x = torch.randn(4, 16) if not isinstance(model, nn.LSTM) else torch.randn(3, 4, 16)
    program = dynamic(model, x)
    broken = x.clone()
    broken[1, 2] = bad
    found = pytree.tree_leaves(program.module(broken))
    assert not any(bool(value.isfinite().any()) for value in found)
    assert all(bool(value.isfinite().all()) for value in pytree.tree_leaves(program(x)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_other_tokens_do_not_know_of_nan(bad: float) -> None:
    model, x = layers(), torch.randn(4, 16)
    program = dynamic(model, x, UINT8_TOKEN)
    broken = x.clone()
    broken[1, 2] = bad
    found, right = program.module(broken), program(x)
    assert not bool(found[1].isfinite().any())
    assert torch.equal(found[[0, 2, 3]], right[[0, 2, 3]])


@pytest.mark.parametrize("method", ["export", "fx"])
def test_an_empty_batch_has_no_range(method: Any) -> None:
    """torch's op for the scale of a whole tensor refuses it; by token, and in the integer form, nothing comes of nothing."""
    model, x = layers(), torch.randn(4, 16)
    how: dict[str, Any] = {"dynamic_shapes": ({0: torch.export.Dim("batch", min=0)},), "method": method}
    whole = dynamic(model, x, **how)
    with pytest.raises(InputError, match="an empty tensor has no range") as caught:
        whole(torch.randn(0, 16))
    assert "integer form" in str(caught.value.advice)
    assert dynamic(model, x, UINT8_TOKEN, **how)(torch.randn(0, 16)).shape == (0, 8)
    assert dynamic(model, x, to="integer", **how)(torch.randn(0, 16)).shape == (0, 8)
    assert torch.equal(whole(x[:1]), dynamic(model, x[:1])(x[:1]))


def test_another_error_is_not_taken_for_that() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.linalg.cholesky(F.linear(x, torch.ones(4, 4)))

    program = qc.capture(Fails().eval(), (torch.eye(4),), method="fx")
    with pytest.raises(RuntimeError, match="cholesky"):
        program(-torch.eye(4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_inputs_of_another_precision_are_refused(dtype: torch.dtype) -> None:
    model, x = layers(), torch.randn(4, 16)
    with pytest.raises(InputError, match="but the program was captured for f32"):
        dynamic(model, x)(x.to(dtype))
    with pytest.raises(AnnotationError, match="nothing was quantized") as caught:
        dynamic(layers().to(dtype), x.to(dtype))
    assert "model.float()" in str(caught.value.advice)


# -- refusals ----------------------------------------------------------------------------------------------------


def refused(model: nn.Module, x: Any, config: QuantConfig, **how: Any) -> AnnotationError:
    with pytest.raises(AnnotationError) as caught:
        qc.quantize(model, (x,), config=config, **how)
    return caught.value


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch"])
@pytest.mark.parametrize("select", ["op", "module", "class", "node"])
def test_an_op_without_a_dynamic_form_is_refused_where_it_is_meant(backend: str, select: str) -> None:
    model, x = layers(nn.Sigmoid()), torch.randn(4, 16)
    spec = INT8_DYNAMIC if backend == "executorch" else UINT8_DYNAMIC
    config = {
        "op": QuantConfig().set_op("sigmoid", spec),
        "module": QuantConfig().set("2", spec),
        "class": QuantConfig().set(nn.Sigmoid, spec),
        "node": QuantConfig().set_node("sigmoid", spec),
    }[select]
    error = refused(model, x, config, backend=backend, batches=[x])
    assert "nothing came of the config's rule" in error.what
    assert "sigmoid (2 : Sigmoid" in str(error.where)
    assert "which are dynamic" in str(error.advice)


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch"])
def test_an_op_without_a_dynamic_form_is_left_float_where_it_is_swept_in(backend: str) -> None:
    model, x = layers(nn.Sigmoid()), torch.randn(4, 16)
    result = qc.quantize(model, (x,), backend=backend, mode="dynamic")
    rows = {row.node: row for row in result.report.coverage.rows}
    assert [rows[name].technique for name in ("linear", "linear_1", "sigmoid", "relu")] == ["dynamic"] * 2 + [""] * 2
    assert rows["sigmoid"].reason
    assert rows["relu"].reason


def test_a_static_op_does_not_meet_a_rule_that_asks_for_run_time_scales() -> None:
    """`add` of x86 computes on what comes quantized: that is not what was asked for."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Any:
            return self.c(self.a(x).reshape(-1, 16) + self.b(x))

    model, x = Sum().eval(), torch.randn(4, 16)
    error = refused(model, x, QuantConfig().set_op("add", UINT8_DYNAMIC), backend="x86", batches=[x])
    assert "nothing came of the config's rule op add" in error.what
    swept = qc.quantize(
        model, (x,), [x], backend="qnnpack", config=QuantConfig().set_all(UINT8_DYNAMIC).set("a", UINT8)
    )
    claims = {node.name: claim.timing for node, claim in swept.prepared.plan.claims.rows.items()}
    assert claims["linear"] is Timing.STATIC
    assert claims["linear_1"] is claims["linear_2"] is Timing.DYNAMIC
    assert "add" not in claims


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch"])
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (INT16.but(timing="dynamic"), "not int16"),
        (FP8_E4M3_WEIGHT.but(role="act", granularity="per-tensor", timing="dynamic"), "not fp8_e4m3"),
        (INT16.but(timing="dynamic", granularity="per-token"), "not int16"),
    ],
    ids=["int16", "fp8", "int16-token"],
)
def test_formats_that_no_kernel_has_are_refused(backend: str, spec: QuantSpec, says: str) -> None:
    model, x = layers(), torch.randn(4, 16)
    error = refused(model, x, QuantConfig().set_all(spec), backend=backend)
    assert f"backend '{backend}' cannot run" in error.what
    assert says in error.what
    assert "timing" not in error.what.partition(": ")[2], "the timing is not what is wrong"
    assert "linear (0 : Linear)" in str(error.where)
    assert "linear_1 (2 : Linear)" in str(error.where)


def test_a_token_is_no_row_of_an_image() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 4)).eval(), torch.randn(2, 3, 6, 6)
    result = qc.quantize(model, (x,), config=QuantConfig().set_all(UINT8_TOKEN))
    rows = {row.node: row for row in result.report.coverage.rows}
    assert rows["linear"].technique == "dynamic"
    assert rows["conv2d"].technique == ""
    error = refused(model, x, QuantConfig().set_op("conv2d", UINT8_TOKEN), batches=[x])
    assert "adds up rows of input_1, which per-token gives different scales" in error.what


@pytest.mark.parametrize("name", ["conv1d", "depthwise", "image"])
def test_the_delegate_of_executorch_has_dynamic_convolutions_of_images_alone(name: str) -> None:
    conv, x = {
        "conv1d": (nn.Conv1d(4, 4, 3), torch.randn(1, 4, 8)),
        "depthwise": (nn.Conv2d(4, 4, 3, groups=4), torch.randn(1, 4, 8, 8)),
        "image": (nn.Conv2d(4, 4, 3), torch.randn(1, 4, 8, 8)),
    }[name]
    model, config = nn.Sequential(conv).eval(), QuantConfig().set("0", INT8_DYNAMIC)
    if name == "image":
        result = qc.quantize(model, (x,), backend="executorch", config=config)
        assert result.report.coverage.techniques["dynamic"] == 1
        return
    assert "no dynamic form" in refused(model, x, config, backend="executorch").what
    static = qc.quantize(model, (x,), [x], backend="executorch")
    assert static.report.coverage.techniques["static"] == 1


class Own:
    """A quantizer of one's own, without modes."""

    name = "own"

    def transforms(self) -> tuple[Any, ...]:
        return ()

    def annotate(self, annotator: Annotator) -> None:
        """Leave all as it is."""

    def validate(self, program: Program) -> None:
        """Nothing was asked for."""

    def supported_operators(self) -> tuple[str, ...]:
        return ()

    def explain(self, program: Program, node: str) -> Any:
        raise NotImplementedError


def test_modes_are_of_backends_that_have_them() -> None:
    model, x = layers(), torch.randn(4, 16)
    with pytest.raises(AnnotationError, match="own has no mode 'dynamic'") as caught:
        qc.quantize(model, (x,), backend=Own(), mode="dynamic")
    assert "static" in str(caught.value.advice)
    with pytest.raises(AnnotationError, match="do not agree on what mode 'dynamic' is"):
        qc.quantize(model, (x,), backend=["x86", "qnnpack"], mode="dynamic")
    both = mode_config(quantizer_of(["x86", "qnnpack"]), "weight-only")
    assert both == mode_config(quantizer_of("x86"), "weight-only")


def test_batches_are_asked_for_only_where_scales_come_from_data() -> None:
    model, x = layers(), torch.randn(4, 16)
    with pytest.raises(CalibrationError, match="no batches were given, and the scales of linear:in0") as caught:
        qc.quantize(model, (x,))
    assert 'mode="dynamic"' in str(caught.value.advice)
    mixed = QuantConfig().set("0", UINT8)
    with pytest.raises(CalibrationError, match=r"the scales of linear:in0 come from data"):
        qc.quantize(model, (x,), mode="dynamic", config=mixed)
    result = qc.quantize(model, (x,), [x], mode="dynamic", config=mixed)
    assert result.report.coverage.techniques == {"static": 2, "dynamic": 1, "weight-only": 0}  # with relu
    qc.quantize(model, (x,), mode="dynamic", config=QuantConfig().set("0", FLOAT))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(bad: float) -> None:
    model = layers()
    model[2].weight.data[2, 3] = bad  # type: ignore[operator]
    with pytest.raises(DataError, match=r"1 of 192 values of 2\.weight are NaN or infinite"):
        dynamic(model, torch.randn(4, 16))


# -- where programs go -------------------------------------------------------------------------------------------

SPECS = [SEVEN_BITS, UINT8_TOKEN, qc.INT8_WEIGHT_ONLY, qc.INT4_GROUP.but(granularity={"kind": "per-group", "size": 8}),
         qc.FP16_WEIGHT, qc.FP8_E4M3_WEIGHT]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_programs_can_be_exported_compiled_and_run_on_other_sizes(spec: QuantSpec) -> None:
    model, x = layers(), torch.randn(4, 16)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = dynamic(model, x, spec, dynamic_shapes=({0: batch},))
    more = torch.randn(9, 16)
    exported = torch.export.export(program.module, (x,), dynamic_shapes=({0: batch},)).module()
    compiled = torch.compile(program.module, backend="aot_eager", dynamic=True, fullgraph=True)
    for inputs in (x, more):
        right = program(inputs)
        assert torch.equal(exported(inputs), right)
        assert torch.equal(compiled(inputs), right)
        assert torch.equal(dynamic(model, inputs, spec)(inputs), right)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda y: self.a(y) * 1, lambda y: self.b(y) * 2, (x,))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_branches_are_entered(spec: QuantSpec) -> None:
    torch.manual_seed(4)
    model, x = Branches().eval(), torch.rand(4, 16)
    program = dynamic(model, x, spec)
    alone = [dynamic(nn.Sequential(layer).eval(), x, spec) for layer in (model.a, model.b)]
    assert torch.equal(program(x), alone[0](x))
    assert torch.equal(program(-x), alone[1](-x) * 2)
    if spec.timing is Timing.DYNAMIC:
        assert sum(is_choice(node) for node in program.nodes()) == 2
    techniques = {row.technique for row in program.coverage().rows if row.op == "linear"}
    assert techniques == {spec.timing.value}
