"""What is no number is refused by name: in what a converted model is made of, in every flow, and in what it is called with,
in every form."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import AnnotationError, InputError, QuantcError
from quantc.flows import eager, pt2e, tracing
from quantc.flows.fx import convert_fx, get_default_qconfig_mapping, prepare_fx
from quantc.flows.pt2e import XNNPACKQuantizer, get_symmetric_quantization_config
from quantc.ir.batch_inputs import batch_of
from quantc.ir.infinite_masks import is_mask
from quantc.ir.program import Program
from quantc.spec.spec import INT32_BIAS
from tests import zoo
from tests.support.biased_backend import backend as biased
from tests.zoo.case import Case

BACKENDS = ("x86", "qnnpack", "executorch", "onnx")
BAD = [math.nan, math.inf]
FEW_BACKENDS = [name if name in ("x86", "onnx") else pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS]
FEW_BAD = [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)]


class Net(nn.Module):
    """A norm that is folded, one that stays, biases, and a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.alone = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 5)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, 0.0, -math.inf]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.alone(torch.relu(self.norm(self.conv(x))))
        return torch.softmax(self.linear(y.mean((2, 3))) + self.mask, -1)


X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(1)
    return Net().eval()


def refused(convert: Callable[[], object], name: str) -> None:
    """It is refused, by name."""
    with pytest.raises(QuantcError) as caught:
        convert()
    assert name in str(caught.value), f"{name} is not in {caught.value}"


# -- what a program is made of -----------------------------------------------------------------------------------------


def prepared(backend: str, **how: Any) -> Program:
    made = qc.prepare(qc.capture(net(), (X,)), backend, **how)
    if how.get("qat"):
        made(X)
    else:
        qc.calibrate(made, [X], progress="silent")
    return made


def read(program: Program) -> Iterator[tuple[str, Tensor]]:
    """The float tensors that a program reads, but for its mask."""
    for node in program.nodes():
        tensor = program.tensor(node)
        if tensor is not None and tensor.is_floating_point() and not is_mask(node):
            yield str(node.target), tensor


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
@pytest.mark.parametrize("qat", [False, True])
def test_convert_refuses_every_tensor_that_is_not_finite(backend: str, qat: bool, bad: float) -> None:
    made = prepared(backend, qat=qat)
    names = [name for name, _ in read(made)]
    assert len(names) >= 6, names
    assert qc.convert(made)(X).isfinite().all(), "a mask may be infinite"
    for name in dict.fromkeys(names):
        broken = made.clone()
        dict(read(broken))[name].data.flatten()[0] = bad
        refused(lambda given=broken: qc.convert(given), name)  # type: ignore[misc]


@pytest.mark.parametrize("bad", FEW_BAD)
@pytest.mark.parametrize("observe", ["minmax", "mse", "moving-average", "percentile", "entropy"])
def test_convert_refuses_every_statistic_that_is_not_finite(observe: str, bad: float) -> None:
    config = qc.QuantConfig().set_all(qc.UINT8.but(observe=observe))
    made = prepared("x86", config=config)
    poked = 0
    for group in made.plan.statistics:
        names = [name for name, value in _parts(made.plan.statistics[group]) if value.is_floating_point()]
        for name in names:
            broken = made.clone()
            dict(_parts(broken.plan.statistics[group]))[name].fill_(bad)
            refused(lambda given=broken: qc.convert(given), group)  # type: ignore[misc]
            poked += 1
        broken = made.clone()
        broken.plan.statistics[group].update(torch.full((2, 3), bad))
        refused(lambda given=broken: qc.convert(given), group)  # type: ignore[misc]
    assert poked or observe in ("mse", "percentile", "entropy"), "histograms count, and hold no floats"


def _parts(observation: Any) -> Iterator[tuple[str, Tensor]]:
    names = (name for kind in type(observation).__mro__ for name in getattr(kind, "__slots__", ()))
    for name in dict.fromkeys((*names, *getattr(observation, "__dict__", ()))):
        if isinstance(value := getattr(observation, name, None), Tensor):
            yield name, value


@pytest.mark.parametrize("bad", FEW_BAD)
@pytest.mark.parametrize("observe", ["moving-average", "lsq", "lsq-plus"])
def test_convert_refuses_every_scale_that_was_trained_and_is_not_finite(observe: str, bad: float) -> None:
    config = qc.QuantConfig().set_all(qc.UINT8.but(observe=observe))
    made = prepared("x86", qat=True, config=config)
    names = [name for name in made.state_dict() if name.rpartition(".")[2] in ("low", "high", "scale", "zero_point")]
    assert names
    for name in names:
        broken = made.clone()
        broken.state_dict()[name].fill_(bad)
        group = name.split(".")[1]
        refused(lambda given=broken: qc.convert(given), group.rpartition("_")[0])  # type: ignore[misc]


class Highest(nn.Module):
    """The largest of the numbers that are not masked out."""

    lowest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("lowest", torch.tensor(-math.inf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, self.linear(x), self.lowest).amax(-1)


def test_infinity_that_is_masked_out_of_a_maximum_is_no_fault() -> None:
    x = torch.rand(3, 4) - 0.1
    made = qc.prepare(qc.capture(Highest().eval(), (x,)), "x86")
    qc.calibrate(made, [x], progress="silent")
    assert qc.convert(made)(x).isfinite().any()
    made.root.get_buffer("lowest").fill_(math.nan)
    refused(lambda: qc.convert(made), "lowest")


def test_a_bias_scale_that_float32_cannot_hold_is_refused() -> None:
    """The product of two scales may be zero, and no bias can be divided by it."""
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.fill_(1e-25)
        layer.bias.zero_()
    fine = {"weight": qc.INT8_NARROW_WEIGHT.but(eps=1e-37), "bias": INT32_BIAS}
    to = replace(biased(**fine), roles={**fine, "act": qc.UINT8.but(eps=1e-37)})
    made = qc.prepare(qc.capture(layer.eval(), (X[:, 0, :4, 0],)), to)
    qc.calibrate(made, [torch.full((4, 4), 1e-25)], progress="silent")
    refused(lambda: qc.convert(made), "the scale of linear:in2 is 0.0")


# -- the flows ---------------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """For eager quantization."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = eager.QuantStub(), eager.DeQuantStub()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.norm(self.conv(self.quant(x))))
        return self.dequant(self.linear(y.mean((2, 3))))


def eager_static() -> tuple[nn.Module, Callable[[Any], Any]]:
    model: Any = Between().eval()
    model = eager.fuse_modules(model, [["conv", "norm", "relu"]])
    model.qconfig = eager.get_default_qconfig("fbgemm")
    model = eager.prepare(model)
    model(X)
    return model, eager.convert


def eager_trained() -> tuple[nn.Module, Callable[[Any], Any]]:
    model: Any = Between().train()
    model = eager.fuse_modules_qat(model, [["conv", "norm", "relu"]])
    model.qconfig = eager.get_default_qat_qconfig("fbgemm")
    model = eager.prepare_qat(model)
    model(X)
    return model.eval(), eager.convert


def eager_dynamic() -> tuple[nn.Module, Callable[[Any], Any]]:
    return nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 3)), eager.quantize_dynamic


def by_fx() -> tuple[nn.Module, Callable[[Any], Any]]:
    made = prepare_fx(net(), get_default_qconfig_mapping("x86"), (X,))
    made(X)
    return made, convert_fx


def own(is_qat: bool = False) -> Any:
    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=is_qat)
    return XNNPACKQuantizer().set_global(config)


def by_pt2e() -> tuple[nn.Module, Callable[[Any], Any]]:
    made = pt2e.prepare_pt2e(torch.export.export(net(), (X,)).module(), own())
    made(X)
    return made, pt2e.convert_pt2e


def trained_by_pt2e() -> tuple[nn.Module, Callable[[Any], Any]]:
    made = pt2e.prepare_qat_pt2e(torch.export.export(net().train(), (X,)).module(), own(is_qat=True))
    made(X)
    return made, pt2e.convert_pt2e


def traced() -> tuple[nn.Module, Callable[[Any], Any]]:
    model = net()
    model.qconfig = eager.get_default_qconfig("fbgemm")  # type: ignore[assignment]
    made = tracing.prepare(model, (X,))
    made(X)
    return made, tracing.convert


FLOWS = [eager_static, eager_trained, eager_dynamic, by_fx, by_pt2e, trained_by_pt2e, traced]


@pytest.mark.parametrize("bad", FEW_BAD)
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__)
def test_convert_of_every_flow_refuses_what_is_not_finite(flow: Any, bad: float) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, convert = flow()
        convert(copy.deepcopy(made))
        names = [
            name
            for name, value in (*made.named_parameters(), *made.named_buffers())
            if value.is_floating_point() and not _is_of_observer(made, name) and not name.endswith("mask")
        ]
        assert len(names) >= 4, names
        for name in names:
            broken = copy.deepcopy(made)
            tensors = dict((*broken.named_parameters(), *broken.named_buffers()))
            tensors[name].data.flatten()[0] = bad
            with pytest.raises(QuantcError) as caught:
                convert(broken)
            assert name.rpartition(".")[2] in str(caught.value), f"{name}: {caught.value}"


def _is_of_observer(model: nn.Module, name: str) -> bool:
    part: Any = model
    for step in name.split(".")[:-1]:
        part = getattr(part, step)
        if callable(getattr(part, "calculate_qparams", None)):
            return True
    return any(step.startswith("_") or step == "observer" for step in name.split("."))


# -- what learns -------------------------------------------------------------------------------------------------------

NORMS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "behind a convolution": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (3, 3, 3)),
    "behind a linear": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), (3,)),
    "alone": (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 3)), (3,)),
    "twice": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)), (3,)),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_one_value_a_channel_is_refused_in_training_as_torch_does(name: str, backend: str) -> None:
    model, shape = copy.deepcopy(NORMS[name])
    one, several = torch.randn(1, *shape), torch.randn(4, *shape)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model.train()(one)
    program = qc.capture(model.eval(), (several,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        program.clone().train()(one)
    made = qc.prepare(program, backend, qat=True)
    made(several)
    before = {key: value.clone() for key, value in made.state_dict().items() if "running" in key}
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        made(one)
    assert all(torch.equal(made.state_dict()[key], value) for key, value in before.items())
    made.eval()
    assert torch.equal(qc.convert(made)(one), made(one)), "in eval mode one value is as good as any"


def test_a_training_program_can_be_compiled_and_exported() -> None:
    model, shape = NORMS["alone"]
    x = torch.randn(4, *shape)
    program = qc.capture(copy.deepcopy(model).eval(), (x,)).train()
    expected = copy.deepcopy(model).train()(x)
    assert torch.equal(torch.export.export(program.clone().module, (x,)).module()(x), expected)
    assert torch.equal(torch.compile(program.clone().module, backend="eager")(x), expected)


@pytest.mark.parametrize("flow", ["eager", "pt2e", "main"])
def test_a_norm_whose_weight_is_zero_trains(flow: str) -> None:
    """Residual networks begin so. Nothing is divided by zero, the channel learns, and what is converted is what was trained."""
    torch.manual_seed(0)
    model: Any = Between() if flow == "eager" else Net()
    model.norm.weight.data[1:3] = 0.0
    model.norm.bias.data.fill_(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if flow == "eager":
            model = eager.fuse_modules_qat(model.train(), [["conv", "norm", "relu"]])
            model.qconfig = eager.get_default_qat_qconfig("fbgemm")
            made: Any = eager.prepare_qat(model)
            gamma = made.conv.bn.weight
        elif flow == "pt2e":
            exported = torch.export.export(model.train(), (X,)).module()
            made = pt2e.prepare_qat_pt2e(exported, own(is_qat=True))
            gamma = dict(made.named_parameters())["norm.weight"]
        else:
            made = qc.prepare(qc.capture(model.eval(), (X,)), "x86", qat=True)
            gamma = dict(made.named_parameters())["norm.weight"]
        out = made(X)
        assert out.isfinite().all()
        (out * torch.randn_like(out)).sum().backward()
        assert gamma.grad.isfinite().all()
        assert (gamma.grad[1:3] != 0).all(), "a channel that is switched off can be switched on again"
        if flow == "pt2e":
            pt2e.move_exported_model_to_eval(made)
            found = pt2e.convert_pt2e(made)(X)
        else:
            made.eval()
            found = (eager if flow == "eager" else qc).convert(made)(X)
        expected = made(X)
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("flow", [eager_static, by_fx], ids=lambda flow: flow.__name__)
def test_converted_models_of_flows_refuse_inputs_that_are_not_finite(flow: Any, bad: float) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, convert = flow()
        quantized = convert(made)
    broken = X.clone()
    broken[1, 1, 1, 1] = bad
    with pytest.raises(InputError, match=r"(input 'x'|what quant is given) holds (NaN|infinity)"):
        quantized(broken)


# -- what it is called with --------------------------------------------------------------------------------------------


def forms(program: Program, backend: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "qdq", qc.convert(program)
    try:
        yield "integer", qc.convert(program, to="integer")
        yield "decomposed", qc.convert(program, to="integer", style="decomposed")
    except QuantcError:
        pass  # not every backend's rules have an integer form
    if backend in ("x86", "qnnpack"):
        yield "lowered", qc.lower(qc.convert(program), backend)


def check_forms(case: Case, backend: str) -> int:
    """How many calls were refused."""
    args, kwargs = case.example()
    program = qc.capture(case.model(), args, example_kwargs=kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    floats = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    try:
        made = qc.prepare(program, backend)
    except AnnotationError:
        return 0  # nothing of it is quantized
    negated = [-leaf if at in floats else leaf for at, leaf in enumerate(leaves)]  # the other branch is taken
    qc.calibrate(made, [batch_of(program, given) for given in (leaves, negated)], progress="silent")
    count = 0
    for name, form in forms(made, backend):
        for at in floats:
            entry = program.graph.find_nodes(op="placeholder")[at]
            if not entry.users:
                continue
            for bad in (*BAD, -math.inf):
                given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                given[at].flatten()[0] = bad
                given_args, given_kwargs = pytree.tree_unflatten(given, spec)
                if is_mask(entry) and not math.isnan(bad):
                    continue
                with pytest.raises(InputError) as caught:
                    form(*given_args, **given_kwargs)
                assert program.signature.inputs[at].name in str(caught.value), (case.name, name, caught.value)
                count += 1
    return count


@pytest.mark.parametrize("name", ["mlp", "encoder_layer", "gru_given_state", "keyword_inputs"])
def test_every_form_refuses_inputs_that_are_not_finite(name: str) -> None:
    assert check_forms(zoo.BY_NAME[name], "x86") >= 9


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_the_zoo_refuses_inputs_that_are_not_finite(backend: str) -> None:
    assert sum(check_forms(case, backend) for case in zoo.CASES) > 300


class Masked(nn.Module):
    """Attention with an additive mask among its inputs."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if not self.by_hand:
            return nn.functional.scaled_dot_product_attention(q, k, v, mask)
        out: Tensor = torch.softmax(q @ k.transpose(-2, -1) + mask.unsqueeze(0), -1) @ v
        return out


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("backend", ["x86", "onnx"])
def test_a_mask_among_the_inputs_may_be_infinite_and_nothing_else(backend: str, by_hand: bool) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 8), torch.triu(torch.full((5, 5), -math.inf), 1)
    program = qc.capture(Masked(by_hand).eval(), (x, mask))
    made = qc.prepare(program, backend)
    qc.calibrate(made, [(x, mask)], progress="silent")
    quantized = qc.convert(made)
    for form in (quantized, qc.convert(made, to="integer"), qc.lower(quantized, backend)):
        for _ in range(4):  # the last from a recording, where there are some
            torch.testing.assert_close(form(x, mask), program(x, mask), atol=0.1, rtol=0)
            for place, name in enumerate(("x", "mask")):
                given = [x.clone(), mask.clone()]
                given[place].flatten()[0] = math.nan
                with pytest.raises(InputError, match=f"'{name}' holds NaN"):
                    form(*given)
            with pytest.raises(InputError, match="'x' holds infinity"):
                form(x * math.inf, mask)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_is_masked_out_as_a_whole_is_refused_where_softmax_makes_nan_of_it(
    backend: str, by_hand: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 8), torch.triu(torch.full((5, 5), -math.inf), 1)
    empty, upwards = mask.clone(), mask.clone()
    empty[2], upwards[2, 1] = -math.inf, math.inf
    program = qc.capture(Masked(by_hand).eval(), (x, mask))
    assert bool(program(x, empty).isnan().any()) == by_hand
    made = qc.prepare(program, backend)
    qc.calibrate(made, [(x, mask)], progress="silent")
    quantized = qc.convert(made)
    lowered = qc.lower(quantized, backend)
    path = tmp_path / {"executorch": "lowered.pte", "onnx": "lowered.onnx"}.get(backend, "lowered.qc")
    lowered.save(path)
    forms = [quantized, qc.convert(made, to="integer"), lowered, *([qc.load(path)] if backend != "onnx" else [])]
    for form in forms:
        for _ in range(4):  # the last from a recording, where there are some
            torch.testing.assert_close(form(x, mask), program(x, mask), atol=0.2, rtol=0)
            if not by_hand:  # attention gives zeros for such a row
                torch.testing.assert_close(form(x, empty), program(x, empty), atol=0.2, rtol=0)
                continue
            with pytest.raises(InputError, match="'mask' holds a row of minus infinity alone: softmax gives NaN"):
                form(x, empty)
            with pytest.raises(InputError, match="'mask' holds infinity"):
                form(x, upwards)


class Padded(nn.Module):
    """Torch's attention with a mask of padding among its inputs."""

    def __init__(self, needs_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.needs_weights = needs_weights

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        made: Tensor = self.attention(x, x, x, key_padding_mask=padding, need_weights=self.needs_weights)[0]
        return made


@pytest.mark.parametrize("needs_weights", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_of_padding_is_followed_through_torchs_attention(backend: str, needs_weights: bool) -> None:
    torch.manual_seed(0)
    x, padding = torch.randn(3, 5, 16), torch.zeros(3, 5)
    padding[0, 3:] = -math.inf
    program = qc.capture(Padded(needs_weights).eval(), (x, padding))
    assert program.signature.opened  # the size of the batch is asked of the mask
    made = qc.prepare(program, backend)
    qc.calibrate(made, [(x, padding)], progress="silent")
    quantized = qc.convert(made)
    for form in (quantized, qc.convert(made, to="integer"), qc.lower(quantized, backend)):
        torch.testing.assert_close(form(x, padding), program(x, padding), atol=0.1, rtol=0)
        with pytest.raises(InputError, match="'x' holds infinity"):
            form(x * math.inf, padding)


def test_the_check_is_of_the_call_and_not_in_the_graph() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    made = qc.prepare(qc.capture(model, (x,)), "x86")
    qc.calibrate(made, [x], progress="silent")
    program = qc.convert(made)
    expected, broken = program(x), x.clone()
    broken[0, 0] = math.nan

    def inside(given: Tensor) -> Any:
        return program(given * 1)

    ways: list[Callable[..., Any]] = [
        torch.export.export(program.module, (x,)).module(),
        torch.compile(program.module, backend="eager", fullgraph=True),
        torch.compile(inside, backend="eager", fullgraph=True),
        make_fx(program)(x),
    ]
    for way in ways:
        assert torch.equal(way(x), expected)
        assert way(broken).shape == expected.shape
    several = torch.stack([x, x])
    assert torch.equal(torch.vmap(program)(several)[0], expected)
    with pytest.raises(InputError, match="holds NaN"):
        torch.vmap(program)(torch.stack([x, broken]))
