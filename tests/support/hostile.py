"""Hostile `.pt2` archives: an honest one with one payload planted. Each payload makes the directory it is given.

They are grouped by when torch itself runs them: in `torch.export.load`, in `.module()` on the loaded program, or when that
module is first called.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.archives import (
    CONSTANTS,
    MODEL,
    SAMPLES,
    WEIGHTS,
    Edit,
    Touch,
    edited,
    pickled,
    put,
    saved,
    small_program,
)

Maker = Callable[[Path], bytes]


class Constant(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self) -> torch.Tensor:
        return self.weight * 2


HONEST = saved(small_program())
WITHOUT_INPUTS = saved(torch.export.export(Constant(), ()))


def touch(marker: Path) -> str:
    """Python that makes the marker, as an expression."""
    return f"__import__('os').mkdir('{marker}')"


def touch_unquoted(marker: Path) -> str:
    """The same without any quote or dot in it."""

    def quoted(text: str) -> str:
        return "+".join(f"chr({ord(letter)})" for letter in text)

    return f"getattr(__import__({quoted('os')}),{quoted('mkdir')})({quoted(str(marker))})"


def renamed(old: object, new: object) -> Edit:
    """Every mention of a name or value swapped for another, in keys and values alike."""

    def edit(document: Any) -> None:
        text = json.dumps(document).replace(json.dumps(old), json.dumps(new))
        document.clear()
        document.update(json.loads(text))

    return edit


def changed(path: tuple[str | int, ...], value: object) -> Edit:
    return lambda document: put(document, path, value)


def signature(document: Any) -> Any:
    return document["graph_module"]["module_call_graph"][0]["signature"]


def first_symbol(document: Any) -> Any:
    values = document["graph_module"]["graph"]["tensor_values"].values()
    return next(size["as_expr"] for value in values for size in value["sizes"] if "as_expr" in size)


def weight_pickle(marker: Path) -> bytes:
    edit = changed(("config", "linear.weight", "use_pickle"), True)
    return edited(HONEST, {WEIGHTS: edit}, {"data/weights/weight_0": pickled(Touch(marker))})


def constant_pickle(marker: Path) -> bytes:
    edit = changed(("config", "scale", "use_pickle"), True)
    return edited(HONEST, {CONSTANTS: edit}, {"data/constants/tensor_0": pickled(Touch(marker))})


def opaque_object(marker: Path) -> bytes:
    edit = changed(
        ("config", "scale"), {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    )
    return edited(HONEST, {CONSTANTS: edit}, {"data/constants/opaque_obj_0": pickle.dumps(Touch(marker))})


def sample_pickle(marker: Path) -> bytes:
    return edited(HONEST, {}, {SAMPLES: pickled(((Touch(marker),), {}))})


def legacy_weights(marker: Path) -> bytes:
    return edited(HONEST, {}, {"data/weights/model.pt": pickled(Touch(marker))})


def size_expression(marker: Path) -> bytes:
    return edited(HONEST, {MODEL: lambda document: first_symbol(document).update(expr_str=touch(marker))})


def input_name(marker: Path) -> bytes:
    """An input is written into `def forward(...)`, so its name can bring a default value, which runs at once."""

    def edit(document: Any) -> None:
        specs = document["graph_module"]["signature"]["input_specs"]
        specs[-1]["constant_input"]["name"] = f"mode={touch(marker)}"

    return edited(HONEST, {MODEL: edit})


def argument_name(marker: Path) -> bytes:
    names = [f"x={touch(marker)}"]
    return edited(WITHOUT_INPUTS, {MODEL: lambda document: signature(document).update(forward_arg_names=names)})


def keyword_name(marker: Path) -> bytes:
    def edit(document: Any) -> None:
        entry = signature(document)
        spec = json.loads(entry["in_spec"])
        spec[1]["children_spec"][1].update(context=json.dumps([f"x={touch_unquoted(marker)}"]))
        entry.update(in_spec=json.dumps(spec), forward_arg_names=None)

    return edited(WITHOUT_INPUTS, {MODEL: edit})


def guard(marker: Path) -> bytes:
    return edited(HONEST, {MODEL: changed(("guards_code",), [touch(marker)])})


def fixed_string(marker: Path) -> bytes:
    """torch compares such an input with its text between quotes, without escaping any quote inside."""
    old, new = {"as_string": "relu"}, {"as_string": f"relu' and {touch(marker)} or 'x"}
    return edited(HONEST, {MODEL: renamed(old, new)})


def sample_key(marker: Path) -> bytes:
    """Keys of the sample inputs are written into the message of a failed guard, again without escaping."""
    key = f'k"+str({touch_unquoted(marker)})+"'
    return edited(HONEST, {}, {SAMPLES: pickled(((torch.randn(5, 4), {key: torch.randn(2)}), {"mode": "relu"}))})


def weight_name(marker: Path) -> bytes:
    edit = renamed("linear.weight", f'linear."+str({touch_unquoted(marker)})+"weight')
    return edited(HONEST, {MODEL: edit, WEIGHTS: edit})


def _container(marker: Path, node: dict[str, object]) -> bytes:
    def edit(document: Any) -> None:
        signature(document).update(out_spec=json.dumps([1, node]))

    return edited(HONEST, {MODEL: edit})


def factory_import(marker: Path) -> bytes:
    context = {"default_factory_module": marker.name, "default_factory_name": "x", "dict_context": ["y", "z"]}
    return _container(marker, {"type": "collections.defaultdict", "context": context, "children_spec": []})


def enum_import(marker: Path) -> bytes:
    context = json.dumps([{"__enum__": True, "fqn": f"{marker.name}:x", "name": "y"}])
    return _container(marker, {"type": "builtins.dict", "context": context, "children_spec": []})


AT_LOAD = (
    weight_pickle,
    constant_pickle,
    opaque_object,
    sample_pickle,
    legacy_weights,
    size_expression,
    input_name,
    factory_import,
    enum_import,
)
AT_UNLIFT = (argument_name, keyword_name)
AT_CALL = (guard, fixed_string, sample_key, weight_name)
MAKERS: tuple[Maker, ...] = (*AT_LOAD, *AT_UNLIFT, *AT_CALL)
