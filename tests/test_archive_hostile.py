"""Hostile `.pt2` files. Each carries a payload that makes a directory; loading must raise and must not make it.

The payloads are real: `test_torch_runs_the_payloads` shows, in another process, that torch's own loader runs them.
"""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._export.serde import schema

from quantc.capture.archive import load_exported
from quantc.capture.vetting import _hints, _kind
from quantc.capture.vetting_expressions import why_not_guard, why_not_size
from quantc.capture.vetting_operators import SYMBOLIC, why_not_operator
from quantc.capture.vetting_rules import KEYS, RULES
from quantc.errors import LoadError
from tests.archives import (
    CONSTANTS,
    MODEL,
    SAMPLES,
    WEIGHTS,
    Edit,
    Touch,
    edited,
    leaves,
    members_of,
    pickled,
    put,
    saved,
    small_program,
    zipped,
)

HONEST = saved(small_program())
Maker = Callable[[Path], bytes]


def touch(marker: Path) -> str:
    """Python that makes the marker, as an expression."""
    return f"__import__('os').mkdir('{marker}')"


def touch_unquoted(marker: Path) -> str:
    """The same without any quote in it."""
    text = "+".join(f"chr({ord(letter)})" for letter in str(marker))
    return f"__import__(chr(111)+chr(115)).mkdir({text})"


def renamed(old: str, new: str) -> Edit:
    """Every mention of a name swapped for another, in keys and values alike."""

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


def node_name(marker: Path) -> bytes:
    """A placeholder is written into `def forward(...)`, so its name can bring a default value, which runs at once."""
    return edited(HONEST, {MODEL: renamed("k", f"k={touch(marker)}")})


def input_name(marker: Path) -> bytes:
    return edited(HONEST, {MODEL: renamed("x", f"x={touch(marker)}")})


def guard(marker: Path) -> bytes:
    return edited(HONEST, {MODEL: changed(("guards_code",), [touch(marker)])})


def guard_default(marker: Path) -> bytes:
    text = f"(lambda y={touch(marker)}: True)()"
    return edited(HONEST, {MODEL: changed(("guards_code",), [text])})


def argument_name(marker: Path) -> bytes:
    names = [f"x={touch(marker)}", "extra=None", "mode=None"]
    return edited(HONEST, {MODEL: lambda document: signature(document).update(forward_arg_names=names)})


def keyword_name(marker: Path) -> bytes:
    def edit(document: Any) -> None:
        entry = signature(document)
        spec = json.loads(entry["in_spec"])
        spec[1]["children_spec"][1]["context"] = json.dumps([f"mode={touch_unquoted(marker)}"])
        entry.update(in_spec=json.dumps(spec), forward_arg_names=None)

    return edited(HONEST, {MODEL: edit})


def fixed_string(marker: Path) -> bytes:
    return edited(HONEST, {MODEL: renamed("relu", f"relu', {touch(marker)}) #")})


def sample_key(marker: Path) -> bytes:
    key = f'k"+str({touch(marker)})+"'
    return edited(HONEST, {}, {SAMPLES: pickled(((torch.randn(5, 4), {key: torch.randn(2)}), {"mode": "relu"}))})


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


# Payloads torch runs in `torch.export.load`, and those it runs in `.module()` on the loaded program.
AT_LOAD: dict[str, Maker] = {
    "weight_pickle": weight_pickle,
    "constant_pickle": constant_pickle,
    "opaque_object": opaque_object,
    "sample_pickle": sample_pickle,
    "legacy_weights": legacy_weights,
    "size_expression": size_expression,
    "input_name": input_name,
    "factory_import": factory_import,
    "enum_import": enum_import,
}
AT_UNLIFT: dict[str, Maker] = {
    "guard_default": guard_default,
    "argument_name": argument_name,
    "keyword_name": keyword_name,
}
