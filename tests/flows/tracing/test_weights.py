"""Weights of a model of the tracing flow that are written to, replaced or loaded: what quantized ops hold agrees with them, or
that is said."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import InputError, LoadError, SaveError
from quantc.flows.tracing import convert, prepare
from tests.support.traced_weights import CHANGED, Block, Net, images

Change = Callable[[Any], Any]


@cache
def calibrated(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    prepared = prepare(Net().eval(), images())
    prepared(images())
    return prepared


def made(phase: str, seed: int = 0) -> Any:
    """A model that is prepared and calibrated, or converted; it was not called since."""
    return copy.deepcopy(calibrated(seed)) if phase == "prepared" else convert(calibrated(seed))


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    torch.manual_seed(7)
    with torch.no_grad():
        yield


def by_address(model: Any) -> None:
    weight = model.head.weight
    raw = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    for index in range(weight.numel()):
        raw[index] = -raw[index]


def other_data(model: Any) -> None:
    model.block.conv.weight.data = model.block.conv.weight.data * 2


def through_storage(model: Any) -> None:
    storage = model.head.weight.untyped_storage()
    storage.copy_((model.head.weight * 2).untyped_storage())


def replaced(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight * 2)


def replaced_in_the_table(model: Any) -> None:
    model.block.norm._buffers["running_mean"] = model.block.norm.running_mean + 1


def taken_away(model: Any) -> None:
    weight = model.block.conv.weight
    del model.block.conv.weight
    model.block.conv.weight = weight * 2


CHANGES: dict[str, Change] = {
    "in place": lambda model: model.block.conv.weight.mul_(2),
    "one element in place": lambda model: model.head.weight[0, 0].add_(1),
    "data": lambda model: model.block.conv.weight.data.mul_(2),
    "data of a bias": lambda model: model.head.bias.data.add_(1),
    "data that is filled": lambda model: model.head.weight.data.zero_(),
    "other data": other_data,
    "data of a buffer": lambda model: model.block.norm.running_var.data.mul_(2),
    "numpy": lambda model: model.head.weight.detach().numpy().__imul__(2),
    "address": by_address,
    "storage": through_storage,
    "detach": lambda model: model.block.conv.weight.detach().mul_(2),
    "all of them": lambda model: [parameter.data.mul_(2) for parameter in model.parameters()],
    "nn.init": lambda model: nn.init.constant_(model.head.weight, 0.5),
    "replaced": replaced,
    "replaced in the table": replaced_in_the_table,
    "taken away": taken_away,
    "half precision": lambda model: model.head.bfloat16().float(),
    "one that another is computed of": lambda model: model.table.data.mul_(2),
    "a float state dict": lambda model: model.load_state_dict(Net().state_dict(), strict=False),
    "a float state dict that is assigned": lambda model: model.load_state_dict(
        Net().state_dict(), strict=False, assign=True
    ),
    "a part of one": lambda model: model.load_state_dict({"head.bias": torch.ones(3)}, strict=False),
    "a state dict of a module": lambda model: model.block.conv.load_state_dict(nn.Conv2d(4, 4, 3).state_dict()),
    "a state dict of a module of its own": lambda model: model.block.load_state_dict(
        Block().state_dict(), strict=False
    ),
}


PAST_TORCH = (
    "data", "data of a bias", "data that is filled", "data of a buffer", "numpy", "address", "storage", "all of them",
)  # fmt: skip
"""What torch does not count: a converted model that has run has its weights packed, and goes on with those."""
WHEN = [
    (how, phase, when)
    for how in CHANGES
    for phase in ("prepared", "converted")
    for when in ("between calls", "before the first call", "before the first call of a copy")
    if (phase, when) != ("converted", "between calls") or how not in PAST_TORCH
]


@pytest.mark.parametrize(("how", "phase", "when"), WHEN)
def test_weights_that_change_are_refused(how: str, phase: str, when: str) -> None:
    model = made(phase)
    if when == "between calls":
        model(images())
    elif when == "before the first call of a copy":
        model(images())
        model = copy.deepcopy(model)
    CHANGES[how](model)
    for _ in range(2):
        with pytest.raises(InputError, match=f"{CHANGED}|another than it was"):
            model(images())


@pytest.mark.parametrize("how", CHANGES)
def test_weights_that_change_before_convert_are_refused(how: str) -> None:
    model = made("prepared")
    CHANGES[how](model)
    with pytest.raises(InputError, match=CHANGED):
        convert(model)


@pytest.mark.parametrize("how", PAST_TORCH)
def test_what_torch_does_not_count_changes_nothing_until_the_model_is_bound_anew(how: str) -> None:
    model, x = made("converted"), images()
    before = model(x)
    CHANGES[how](model)
    if how == "all of them":  # one is computed of another at each call
        with pytest.raises(InputError, match="another than it was"):
            model(x)
    else:
        assert torch.equal(model(x), before)
    with pytest.raises(InputError, match=CHANGED):
        copy.deepcopy(model)(x)


@pytest.mark.parametrize("name", ["head.weight", "head.bias", "block.conv.weight", "block.norm.running_mean"])
def test_one_element_that_is_written_past_torch_is_noticed_while_statistics_are_taken(name: str) -> None:
    prepared = made("prepared")
    prepared(images())
    flat = prepared.state_dict()[name].view(-1)
    order = flat.argsort()
    flat.data[order[len(order) // 2]] += 1e-3  # neither the largest nor the smallest
    with pytest.raises(InputError, match=name):
        prepared(images())


def test_a_factor_of_a_weight_that_changes_is_refused() -> None:
    for phase in ("prepared", "converted"):
        model = made(phase)
        model(images())
        model.factor = 3.0
        with pytest.raises(InputError, match="made of table that is another"):
            model(images())
        model.factor = 2.0
        model(images())


MOVES: dict[str, Change] = {
    "share_memory": lambda model: model.share_memory(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
    "the same in other memory": lambda model: setattr(model.head.weight, "data", model.head.weight.data.clone()),
    "float": lambda model: model.float(),
}


@pytest.mark.parametrize("phase", ["prepared", "converted"])
@pytest.mark.parametrize("how", MOVES)
def test_weights_may_lie_elsewhere(how: str, phase: str) -> None:
    model, x = made(phase), images()
    expected = model(x)
    MOVES[how](model)
    for _ in range(4):
        assert torch.equal(model(x), expected)
    model.block.conv.weight.mul_(2)
    with pytest.raises(InputError, match=CHANGED):
        model(x)


def test_a_module_that_is_called_by_itself_is_held_to_its_weights() -> None:
    for phase in ("prepared", "converted"):
        model, x = made(phase), images()
        twin = copy.deepcopy(model)
        inner = twin.block(x)
        assert torch.equal(twin(x), model(x))
        alone = copy.deepcopy(twin.block)
        assert torch.equal(alone(x), inner)
        for each in (twin.block, alone):
            each.conv.weight.detach().mul_(2)
            with pytest.raises(InputError, match=r"block\.conv\.weight was written"):
                each(x)


@pytest.mark.parametrize("is_assigned", [False, True])
@pytest.mark.parametrize("when", ["before it is called", "after it was called"])
@pytest.mark.parametrize("phase", ["prepared", "converted"])
def test_a_state_dict_of_a_model_made_alike_gives_what_that_one_gives(phase: str, when: str, is_assigned: bool) -> None:
    saved, fresh, x = made(phase, 1), made(phase, 2), images()
    if when == "after it was called":
        fresh(x)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=is_assigned)
    if phase == "prepared":
        assert torch.equal(convert(fresh)(x), convert(saved)(x))  # it has seen what the other has
    assert torch.equal(fresh(x), saved(x))
    twins = [saved, fresh, copy.deepcopy(fresh)]
    if phase == "prepared":
        twins = [convert(each) for each in twins]
    for _ in range(4):
        assert all(torch.equal(twin(x), twins[0](x)) for twin in twins)


PARTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "without one weight": lambda rows: {name: row for name, row in rows.items() if name != "block.conv.weight"},
    "without a buffer": lambda rows: {name: row for name, row in rows.items() if not name.endswith("running_var")},
    "without what was seen": lambda rows: {name: row for name, row in rows.items() if "_auto_quant" not in name},
    "only what was seen": lambda rows: {name: row for name, row in rows.items() if "_auto_quant" in name},
}


@pytest.mark.parametrize("phase", ["prepared", "converted"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_state_dict_is_refused(part: str, phase: str) -> None:
    saved, model = made(phase, 1).state_dict(), made(phase, 2)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(PARTS[part](saved))
    model = made(phase, 2)
    model.load_state_dict(PARTS[part](saved), strict=False)
    with pytest.raises(InputError, match=CHANGED):
        model(images())
    model.load_state_dict(saved)
    model(images())


def test_a_state_dict_of_another_phase_is_refused() -> None:
    prepared, quantized = made("prepared"), made("converted")
    for model, other in ((prepared, quantized), (quantized, prepared)):
        with pytest.raises(LoadError, match="another phase"):
            model.load_state_dict(other.state_dict())


@pytest.mark.parametrize("phase", ["prepared", "converted"])
def test_models_are_not_pickled(phase: str) -> None:
    with pytest.raises(SaveError, match="cannot be pickled"):
        pickle.dumps(made(phase))


@pytest.mark.parametrize("place", [0, 9, 19])
def test_one_of_many_weights_that_is_written_to_is_noticed(place: int) -> None:
    torch.manual_seed(0)
    prepared = prepare(nn.Sequential(*(nn.Linear(4, 4) for _ in range(20))).eval(), torch.randn(2, 4))
    prepared(torch.randn(2, 4))
    model: Any = convert(prepared)
    model(torch.randn(2, 4))
    model[place].weight.detach().mul_(2)
    with pytest.raises(InputError, match=rf"{place}\.weight {CHANGED}"):
        model(torch.randn(2, 4))
