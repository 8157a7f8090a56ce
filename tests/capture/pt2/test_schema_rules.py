"""Rules for every text of an exported program: what torch would paste into code must be unable to become code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch._export.serde import schema

from quantc.capture.pt2.document_checks import _hints, _kind
from quantc.capture.pt2.schema_rules import CUSTOM_OBJECT, KEYS, RULES, WHOLE
from tests.support.archives import MODEL, WEIGHTS, edited, refusal
from tests.support.hostile import HONEST, renamed


def test_every_text_of_the_schema_has_a_rule() -> None:
    """A newer torch may add fields; each needs a decision here before files that use it load."""
    seen: set[type] = set()
    fields: set[tuple[str, str]] = set()
    tables: set[tuple[str, str]] = set()
    stack: list[tuple[object, tuple[str, str]]] = [(schema.ExportedProgram, ("", "")), (schema.PayloadConfig, ("", ""))]
    while stack:
        hint, field = stack.pop()
        kind, inner = _kind(hint)
        assert kind != "unknown", field
        if kind == "str":
            fields.add(field)
        elif kind in ("list", "dict", "optional"):
            tables |= {field} if kind == "dict" else set()
            stack.append((inner, field))
        elif kind in ("record", "union") and isinstance(inner, type) and inner not in seen:
            seen.add(inner)
            stack.extend((hint, (inner.__name__, name)) for name, hint in _hints(inner).items())
    assert fields == RULES.keys()
    assert tables == KEYS.keys()


def test_attribute_paths_stay_inside_the_module(tmp_path: Path) -> None:
    edit = renamed("linear.weight", "__class__.__base__.forward")
    assert "not a path of module attributes" in refusal(edited(HONEST, {MODEL: edit, WEIGHTS: edit}), tmp_path)


def test_source_functions_are_not_walked_into_builtins(tmp_path: Path) -> None:
    def edit(document: Any) -> None:
        document["graph_module"]["graph"]["nodes"][0]["metadata"]["source_fn_stack"] = "x,torch.load.__globals__"

    assert "source function" in refusal(edited(HONEST, {MODEL: edit}), tmp_path)


def test_custom_objects(tmp_path: Path) -> None:
    spec = {"custom_obj": {"arg": {"name": "x", "class_fqn": "__torch__.torch.classes.a.B"}, "custom_obj_name": "b"}}

    def edit(document: Any) -> None:
        document["graph_module"]["signature"]["input_specs"].append(spec)

    text = refusal(edited(HONEST, {MODEL: edit}), tmp_path)
    assert "custom class" in text
    assert "without custom class objects" in text


Field = tuple[str, str]
TAKEN: list[tuple[Field, str]] = [
    (("TensorArgument", "name"), "p_linear_weight"),
    (("NamedArgument", "name"), "from"),
    (("NamedArgument", "name"), ""),
    (("InputToParameterSpec", "parameter_name"), "blocks.0.my-layer.weight"),
    (("ModuleCallEntry", "fqn"), ""),
    (("PayloadMeta", "path_name"), "weight_0"),
    (("ExportedProgram", "verifiers"), "TRAINING"),
    (("ConstantValue", "as_string"), "relu, or not"),
    (("Argument", "as_string"), "anything's \n allowed: it is quoted by repr"),
]
REFUSED: list[tuple[Field, str]] = [
    (("TensorArgument", "name"), "x y"),
    (("TensorArgument", "name"), "import"),
    (("TensorArgument", "name"), ""),
    (("NamedArgument", "name"), "a=b"),
    (("InputToParameterSpec", "parameter_name"), "a..b"),
    (("InputToParameterSpec", "parameter_name"), "a.__class__"),
    (("InputToParameterSpec", "parameter_name"), "a'b"),
    (("PayloadMeta", "path_name"), "../weight_0"),
    (("PayloadMeta", "path_name"), "w" * 65),
    (("ExportedProgram", "verifiers"), "EDGE"),
    (("ConstantValue", "as_string"), "'+x+'"),
    (("ConstantValue", "as_string"), "back\\slash"),
    (("CustomObjArgument", "class_fqn"), "anything"),
]


@pytest.mark.parametrize(("field", "text"), TAKEN)
def test_texts_that_torch_writes_are_taken(field: Field, text: str) -> None:
    assert RULES[field](text) is None


@pytest.mark.parametrize(("field", "text"), REFUSED)
def test_texts_that_could_become_code_are_refused(field: Field, text: str) -> None:
    assert RULES[field](text)


def test_keys_of_tables_are_checked_like_names() -> None:
    assert KEYS["Graph", "tensor_values"]("x_1") is None
    assert KEYS["Graph", "tensor_values"]("x 1")
    assert KEYS["PayloadConfig", "config"]("layer.0.weight") is None
    assert KEYS["PayloadConfig", "config"]("__dict__")
    assert KEYS["Graph", "custom_obj_values"]("x") == CUSTOM_OBJECT


def test_strings_that_inputs_are_compared_with_are_quiet() -> None:
    check = WHOLE["Graph", "inputs"]
    assert check([{"as_string": "relu"}, {"as_int": 3}, {"as_string": 5}]) is None
    assert check([{"as_string": "relu"}, {"as_string": "a'b"}])
    assert WHOLE["UserInputSpec", "arg"]({"as_string": 'a"b'})


def test_metadata_with_line_ends_or_foreign_functions_is_refused() -> None:
    check = WHOLE["Node", "metadata"]
    assert check({"stack_trace": "File a.py\n  x = y", "source_fn_stack": "l,torch.nn.Linear;a,_operator.add"}) is None
    assert check({"stack_trace": "x\rimport os"})
    assert check({"stack_trace": "x\0"})
    assert check({"source_fn_stack": "l,torch.nn.Linear;x,torch.load.__globals__"})
