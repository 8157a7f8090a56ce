"""The eager flow against torch's own, on the same models, weights and data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.nn import QuantizedTensor, torch_state_dict
from tests.support.eager_models import CASES, QUANTC, TORCH, Case, Library, grids

STEPS = 20


@pytest.fixture(autouse=True)
def fbgemm() -> Iterator[None]:
    """torch's kernels for "x86" give transposed convolutions that are 40 steps off on some processors."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    yield
    torch.backends.quantized.engine = before


def config(library: Library, name: str) -> Any:
    """torch has no scales by channel for transposed convolutions."""
    return library.flow.get_default_qconfig("qnnpack" if name == "transposed" else "fbgemm")


def calibrated(library: Library, name: str) -> nn.Module:
    case = CASES[name]
    return library.calibrated(case.made(library), case.fuse, case.data(), config(library, name))


def weights(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if callable(weight):
            found[path] = weight()
    return found


def as_ours(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_quantized:
        return QuantizedTensor(value.int_repr(), value.q_scale(), value.q_zero_point())
    return value


@pytest.mark.parametrize("name", CASES)
def test_the_scales_are_torchs_bit_for_bit(name: str) -> None:
    theirs, ours = (library.converted(calibrated(library, name)) for library in (TORCH, QUANTC))
    assert len(grids(theirs)) > 1
    assert grids(ours) == grids(theirs)
    for path, weight in weights(theirs).items():
        mine = weights(ours)[path]
        assert torch.equal(mine.int_repr(), weight.int_repr())
        if weight.qscheme() == torch.per_tensor_affine:
            assert mine.q_scale() == weight.q_scale()
        else:
            assert torch.equal(mine.q_per_channel_scales().double(), weight.q_per_channel_scales().double())


@pytest.mark.parametrize("name", CASES)
def test_each_layer_is_within_one_step_and_so_is_the_model(name: str) -> None:
    theirs, ours = (library.converted(calibrated(library, name)) for library in (TORCH, QUANTC))
    x = CASES[name].data(4)[3]
    seen: dict[str, tuple[Any, Any]] = {}
    for path, module in theirs.named_modules():
        if path in grids(theirs):
            module.register_forward_hook(lambda _, args, out, path=path: seen.update({path: (args, out)}))
    expected = theirs(x)
    for path, (args, out) in seen.items():
        made = ours.get_submodule(path)(*map(as_ours, args))
        assert int((made.int_repr().int() - out.int_repr().int()).abs().max()) <= 1, path
    assert len(seen) > 1
    last = [scale for scale, _ in grids(theirs).values()][-1]
    assert float((ours(x) - expected).abs().max()) <= last * 1.001


@pytest.mark.parametrize("name", CASES)
def test_prepared_state_dicts_load_both_ways(name: str) -> None:
    theirs, ours = calibrated(TORCH, name), calibrated(QUANTC, name)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    fresh = [library.calibrated(CASES[name].made(library), CASES[name].fuse, [CASES[name].data(5)[4]], config(library, name))
             for library in (TORCH, QUANTC)]  # fmt: skip
    fresh[0].load_state_dict(ours.state_dict())
    fresh[1].load_state_dict(theirs.state_dict())
    first, second = grids(TORCH.converted(fresh[0])), grids(QUANTC.converted(fresh[1]))
    assert first == second == grids(QUANTC.converted(ours))


def trained(library: Library, case: Case) -> tuple[list[float], nn.Module]:
    """The losses of a few steps of training, and the model after them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = case.made(library).train()
        model = library.flow.fuse_modules_qat(model, case.fuse) if case.fuse else model
        model.qconfig = library.flow.get_default_qat_qconfig("fbgemm")
        # convolutions of one dimension are not rounded in torch's training, and their weights are quantized all the same
        table = library.flow.get_default_qat_module_mappings()
        model = library.flow.prepare_qat(model, {key: made for key, made in table.items() if key is not nn.Conv1d})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for batch in case.data(STEPS):
        loss = model(batch).square().mean() + model(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.eval()


TRAINED = [name for name, case in CASES.items() if case.trains]


@pytest.mark.parametrize("name", TRAINED)
def test_training_has_torchs_losses(name: str) -> None:
    (theirs, their_model), (ours, our_model) = (trained(library, CASES[name]) for library in (TORCH, QUANTC))
    assert len(ours) == STEPS
    assert ours[0] != ours[-1]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-5)
    assert our_model.state_dict().keys() == their_model.state_dict().keys()
    our_model.load_state_dict(their_model.state_dict())
    their_model.load_state_dict(our_model.state_dict())
    converted = QUANTC.converted(our_model), TORCH.converted(their_model)
    for (scale, zero_point), (other, other_zero) in zip(*(grids(model).values() for model in converted), strict=True):
        assert scale == pytest.approx(other, rel=1e-4)
        assert zero_point == other_zero


def test_there_are_enough_models() -> None:
    assert len(CASES) >= 10
    assert len(TRAINED) >= 10


@pytest.mark.parametrize("name", [name for name in CASES if name != "elu"])  # torch does not save its scale
def test_converted_state_dicts_load_both_ways(name: str) -> None:
    theirs, ours = (library.converted(calibrated(library, name)) for library in (TORCH, QUANTC))
    case, x = CASES[name], CASES[name].data(4)[3]
    expected = theirs(x), ours(x)
    other = [case.data(7)[6]]
    fresh = [
        library.quantized(case.made(library), case.fuse, other, config(library, name)) for library in (TORCH, QUANTC)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fresh[0].load_state_dict(torch_state_dict(ours))
        fresh[1].load_state_dict(theirs.state_dict())
    assert grids(fresh[0]) == grids(fresh[1]) == grids(theirs)
    assert torch.equal(fresh[0](x), expected[0])
    assert torch.equal(fresh[1](x), expected[1])


@pytest.mark.parametrize("name", CASES)
def test_models_made_of_torchs_own_stubs_are_taken_as_they_are(name: str) -> None:
    case = CASES[name]
    qconfig = config(TORCH, name)  # and so are torch's qconfigs, with their observers
    made = QUANTC.quantized(case.made(TORCH), case.fuse, case.data(), qconfig)
    expected = QUANTC.converted(calibrated(QUANTC, name))
    assert grids(made) == grids(expected)
    assert torch.equal(made(case.data()[0]), expected(case.data()[0]))
