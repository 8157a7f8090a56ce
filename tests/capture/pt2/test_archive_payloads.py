"""Tensors and sample inputs of a `.pt2` archive, rebuilt from bytes without running any of them."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.capture.pt2.archive_members import Members, open_archive
from quantc.capture.pt2.archive_payloads import sample_inputs, tensors, unpickle
from quantc.errors import LoadError
from tests.support.archives import SAMPLES, WEIGHTS, Touch, edited, members_of, pickled, refusal, zipped
from tests.support.hostile import HONEST, changed


def test_bomb_inside_the_sample_inputs(tmp_path: Path) -> None:
    inner = zipped({"data.pkl": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)
    assert "compressed" in refusal(edited(HONEST, {}, {SAMPLES: inner}), tmp_path)


def test_tensor_larger_than_its_bytes(tmp_path: Path) -> None:
    sizes = ("config", "linear.weight", "tensor_meta", "sizes")
    edit = changed(sizes, [{"as_int": 1 << 40}, {"as_int": 4}])
    assert "linear.weight" in refusal(edited(HONEST, {WEIGHTS: edit}), tmp_path)


def test_weight_without_bytes(tmp_path: Path) -> None:
    text = refusal(edited(HONEST, {}, {"data/weights/weight_0": b""}), tmp_path)
    assert "fake weights" in text


def test_samples_that_are_not_a_pickle(tmp_path: Path) -> None:
    for data in (b"PK", b"noise", pickle.dumps(1), HONEST):
        assert SAMPLES in refusal(edited(HONEST, {}, {SAMPLES: data}), tmp_path)


CONFIG = json.loads(members_of(HONEST)[WEIGHTS])["config"]
"""How torch describes the weights of an honest archive."""


def members(content: dict[str, bytes]) -> Members:
    data = zipped(content)
    return Members(open_archive(io.BytesIO(data)), len(data))


def described(**entries: Any) -> bytes:
    return json.dumps({"config": entries}).encode()


def meta(sizes: list[int], strides: list[int], offset: int = 0, **changes: Any) -> dict[str, Any]:
    """A description of a view of `weight_0`, like torch's own."""
    entry = json.loads(json.dumps(CONFIG["linear.weight"]))
    entry["tensor_meta"].update(
        sizes=[{"as_int": size} for size in sizes],
        strides=[{"as_int": stride} for stride in strides],
        storage_offset={"as_int": offset},
    )
    return {**entry, **changes}


def read(raw: Tensor, **entries: Any) -> dict[str, Tensor]:
    content = {WEIGHTS: described(**entries), "data/weights/weight_0": raw.numpy().tobytes()}
    return tensors(members(content), "model", "weights")


def test_views_are_rebuilt_from_their_bytes_and_share_them() -> None:
    raw = torch.arange(6.0)
    found = read(raw, a=meta([2, 3], [3, 1]), b=meta([3, 2], [1, 3]), c=meta([2], [1], 4))
    assert torch.equal(found["a"], raw.reshape(2, 3))
    assert torch.equal(found["b"], raw.reshape(2, 3).T)
    assert found["c"].tolist() == [4.0, 5.0]
    assert isinstance(found["a"], torch.nn.Parameter)
    assert found["a"].untyped_storage().data_ptr() == found["c"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (meta([7], [1]), "cannot be rebuilt"),
        (meta([2], [1], 5), "cannot be rebuilt"),
        (meta([-1], [1]), "cannot be rebuilt"),
        (meta([2], [1], path_name="custom_obj_0"), "something other than a tensor"),
        (meta([2], [1], tensor_meta=None), "not described"),
    ],
)
def test_descriptions_that_reach_beyond_the_bytes_are_refused(entry: dict[str, Any], told: str) -> None:
    with pytest.raises(LoadError, match=told) as caught:
        read(torch.arange(6.0), odd=entry)
    assert "odd" in caught.value.what


def test_sizes_that_are_expressions_are_refused() -> None:
    entry = meta([2], [1])
    entry["tensor_meta"]["sizes"] = [{"as_expr": {"expr_str": "s0", "hint": None}}]
    with pytest.raises(LoadError, match="not a number"):
        read(torch.arange(6.0), odd=entry)


def test_a_weight_may_be_pickled_if_it_is_a_tensor() -> None:
    entry = meta([2], [1], use_pickle=True)
    content = {WEIGHTS: described(w=entry), "data/weights/weight_0": pickled(torch.tensor([3.0, 4.0]))}
    assert tensors(members(content), "model", "weights")["w"].tolist() == [3.0, 4.0]
    content["data/weights/weight_0"] = pickled([1, 2])
    with pytest.raises(LoadError, match="a list, not a tensor"):
        tensors(members(content), "model", "weights")


def test_sample_inputs_are_given_back_or_absent() -> None:
    given = ((torch.ones(2), 3), {"mask": {"k": [None, True]}})
    found: Any = sample_inputs(members({SAMPLES: pickled(given)}), "model")
    args, kwargs = found
    assert (args[0].tolist(), args[1], kwargs) == ([1.0, 1.0], 3, {"mask": {"k": [None, True]}})
    assert sample_inputs(members({SAMPLES: b""}), "model") is None


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([torch.ones(1)], "positional and keyword"),
        (((torch.ones(1),), {"it's": 1}), "odd key"),
        (((OrderedDict(a={(1, 2): 3}),), {}), "odd key"),
        (((bytearray(b"x"),), {}), "bytearray"),
    ],
)
def test_sample_inputs_of_another_form_are_refused(value: object, told: str) -> None:
    with pytest.raises(LoadError, match=told) as caught:
        sample_inputs(members({SAMPLES: pickled(value)}), "model")
    assert caught.value.where == SAMPLES


def test_pickles_that_call_something_are_refused_unread(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(LoadError, match="mkdir") as caught:
        unpickle(pickled(Touch(marker)), "data/x.pt")
    assert caught.value.where == "data/x.pt"
    assert not marker.exists()
