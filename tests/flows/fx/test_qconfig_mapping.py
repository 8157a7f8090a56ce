"""QConfigMapping: what gets which QConfig, against torch's own resolution; the dict forms; what is refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao import quantization as ao
    from torch.ao.quantization import quantize_fx as upstream

from quantc.errors import ConfigError
from quantc.flows.fx import (
    QConfig,
    QConfigMapping,
    default_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.observers import MinMaxObserver, default_weight_observer
from tests.support.fx_observed import is_same, observed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Any:
        return functional.linear(self.linear(x), self.w)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = nn.Sequential(Inner(), Inner()), nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Any:
        x = functional.linear(self.other(self.block(x)), self.w)
        return functional.linear(x, self.w) + x


KEYS: tuple[tuple[Any, ...], ...] = (
    ("set_global",),
    ("set_object_type", nn.Linear),
    ("set_object_type", functional.linear),
    ("set_object_type", Inner),
    ("set_module_name_regex", r"block\.\d"),
    ("set_module_name_regex", "other"),
    ("set_module_name", "block"),
    ("set_module_name", "block.1"),
    ("set_module_name", "block.0.linear"),
    ("set_module_name_object_type_order", "", functional.linear, 1),
    ("set_module_name_object_type_order", "block.1", functional.linear, 0),
    ("set_module_name_object_type_order", "block.0", nn.Linear, 0),
)
torch_qconfig: Any = ao.QConfig
torch_default: Any = getattr(ao, "default_qconfig")  # noqa: B009 - torch does not export it
CONFIGS: tuple[tuple[Any, Any], ...] = (
    (None, None),
    *(
        (
            QConfig(MinMaxObserver.with_args(quant_min=0, quant_max=top), default_weight_observer),
            torch_qconfig(ao.MinMaxObserver.with_args(quant_min=0, quant_max=top), ao.default_weight_observer),
        )
        for top in (255, 127)
    ),
)
CHOICES = st.dictionaries(st.integers(0, len(KEYS) - 1), st.sampled_from(CONFIGS), max_size=5)


@settings(max_examples=15)
@given(choices=CHOICES)
def test_the_same_tensors_are_observed_as_by_torch(choices: dict[int, tuple[Any, Any]]) -> None:
    torch.manual_seed(0)
    model, x = Outer().eval(), torch.randn(3, 8)
    mine, theirs = QConfigMapping(), ao.QConfigMapping()
    for number, (ours, torchs) in sorted(choices.items()):
        name, *rest = KEYS[number]
        getattr(mine, name)(*rest, ours)
        getattr(theirs, name)(*rest, torchs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(model, mine, (x,))
        other = upstream.prepare_fx(copy.deepcopy(model), theirs, (x,))
        left, right = observed(prepared, x), observed(other, x)
    assert all(any(is_same(row, found) for found in right) for row in left)
    assert all(any(is_same(row, found) for found in left) for row in right)


@pytest.mark.parametrize("backend", ["x86", "fbgemm", "qnnpack", "onednn"])
def test_defaults_are_about_the_same_things_as_torchs(backend: str) -> None:
    for ours, theirs in (
        (get_default_qconfig_mapping(backend), ao.get_default_qconfig_mapping(backend)),
        (get_default_qat_qconfig_mapping(backend), ao.get_default_qat_qconfig_mapping(backend)),
    ):
        assert [*ours.object_type_qconfigs] == [*theirs.object_type_qconfigs]
        pairs: list[tuple[Any, Any]] = [(ours.global_qconfig, theirs.global_qconfig)]
        pairs += zip(ours.object_type_qconfigs.values(), theirs.object_type_qconfigs.values(), strict=True)
        for mine, torchs in pairs:
            for made, expected in ((mine.activation(), torchs.activation()), (mine.weight(), torchs.weight())):
                assert type(made).__name__ == type(expected).__name__
                for name in ("dtype", "qscheme", "quant_min", "quant_max"):
                    assert getattr(made, name, None) == getattr(expected, name, None), (type(made), name)


def test_a_backend_that_there_is_not() -> None:
    with pytest.raises((ConfigError, AssertionError), match="unknown backend 'x87'"):
        get_default_qconfig_mapping("x87")


# -- dict forms --------------------------------------------------------------------------------------------------------


def test_a_mapping_reads_back() -> None:
    mapping = get_default_qconfig_mapping().set_module_name("a", None).set_module_name_regex("b.*", default_qconfig)
    mapping.set_module_name_object_type_order("c", functional.linear, 2, default_qconfig)
    data = mapping.to_dict()
    assert list(data) == ["", "object_type", "module_name_regex", "module_name", "module_name_object_type_order"]
    assert data["module_name_object_type_order"] == [("c", functional.linear, 2, default_qconfig)]
    assert QConfigMapping.from_dict(data) == mapping
    assert QConfigMapping.from_dict({"": default_qconfig}) == QConfigMapping().set_global(default_qconfig)


def test_the_dict_form_is_taken_for_a_mapping_and_so_is_torchs() -> None:
    x = torch.randn(2, 8)
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    for mapping in ({"": default_qconfig}, ao.QConfigMapping().set_global(torch_default)):
        prepared = prepare_fx(model, mapping, (x,))
        prepared(x)
        assert len([name for name, _ in prepared.named_children() if name.startswith("activation")]) == 2


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda: QConfigMapping.from_dict({"modules": []}), "has no key 'modules'"),
        (lambda: QConfigMapping.from_dict({"module_name": [("a",)]}), "'module_name' holds"),
        (lambda: QConfigMapping().set_global("int8"), "'int8' is no QConfig"),
    ],
)
def test_what_cannot_be_read_is_refused(made: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what) as caught:
        made()
    assert isinstance(caught.value, ConfigError)
    assert caught.value.advice
