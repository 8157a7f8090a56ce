"""Documents against torch's own schema: each value of its field's type, and the first fault named by its path."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import pytest
from torch._export.serde import schema

from quantc.capture.pt2.document_checks import OBJECTS, Spot, vet
from quantc.errors import LoadError
from tests.support.archives import MODEL, members_of, put
from tests.support.hostile import HONEST

DOCUMENT = json.loads(members_of(HONEST)[MODEL])
NODE = ("graph_module", "graph", "nodes", 0)


def test_what_torch_writes_fits() -> None:
    vet(DOCUMENT, schema.ExportedProgram, MODEL)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("schema_version", "major"), "8", "64-bit integer"),
        (("schema_version", "major"), True, "64-bit integer"),
        (("schema_version", "major"), 1 << 64, "64-bit integer"),
        (("torch_version",), 3, "text"),
        (("verifiers",), "ATEN", "a list"),
        (("range_constraints",), [], "a table"),
        (("graph_module",), None, "a table"),
        ((*NODE, "target"), None, "text"),
        ((*NODE, "inputs", 0, "arg"), {}, "one entry"),
        ((*NODE, "inputs", 0, "arg"), {"as_nothing": 1}, "as_nothing"),
        ((*NODE, "inputs", 0, "arg"), {"as_bool": 1}, "true or false"),
        ((*NODE, "inputs", 0, "arg"), {"as_float": "1.5"}, "a number"),
        ((*NODE, "inputs", 0, "arg"), {"as_scalar_type": 999}, "one of"),
        ((*NODE, "inputs", 0), {"name": "x"}, "lacks the entry 'arg'"),
    ],
)
def test_a_value_of_another_type_is_refused_at_its_path(path: tuple[str | int, ...], value: Any, told: str) -> None:
    document = copy.deepcopy(DOCUMENT)
    put(document, path, value)
    with pytest.raises(LoadError) as caught:
        vet(document, schema.ExportedProgram, MODEL)
    assert told in caught.value.what
    assert str(path[0]) in str(caught.value.where)
    assert str(caught.value.where).startswith(MODEL)


@pytest.mark.parametrize("word", ["Infinity", "-Infinity", "NaN", 1, 2.5])
def test_floats_may_be_the_words_of_json(word: object) -> None:
    document = copy.deepcopy(DOCUMENT)
    put(document, (*NODE, "inputs", 0, "arg"), {"as_float": word})
    vet(document, schema.ExportedProgram, MODEL)


def test_custom_objects_have_advice_of_their_own() -> None:
    document = copy.deepcopy(DOCUMENT)
    put(document, (*NODE, "inputs", 0, "arg"), {"as_custom_obj": {"name": "a", "class_fqn": "b"}})
    with pytest.raises(LoadError) as caught:
        vet(document, schema.ExportedProgram, MODEL)
    assert caught.value.advice == OBJECTS


def test_fields_without_a_rule_fail_closed() -> None:
    @dataclass
    class Newer:
        note: str

    @dataclass
    class Odd:
        data: bytes

    with pytest.raises(LoadError, match="does not know how to check") as caught:
        vet({"note": "harmless"}, Newer, "m.json")
    assert caught.value.where == "m.json, note"
    with pytest.raises(LoadError, match="does not know how to check"):
        vet({"data": "x"}, Odd, "m.json")
    with pytest.raises(LoadError, match="a table") as top:
        vet([], Newer, "m.json")
    assert top.value.where == "m.json, top level"


def test_a_spot_knows_the_path_to_it() -> None:
    root = Spot({}, object, ("", ""))
    spot = root.child([], object, ".nodes").child({}, object, "[3]").child("x", str, ".name", ("Node", "name"))
    assert spot.path() == "nodes[3].name"
    assert spot.field == ("Node", "name")


def test_deep_documents_do_not_exhaust_the_stack() -> None:
    arg: dict[str, Any] = {"as_none": True}
    for _ in range(3000):
        arg = {"as_string_to_argument": {"k": arg}}
    document = copy.deepcopy(DOCUMENT)
    put(document, (*NODE, "inputs", 0, "arg"), arg)
    vet(document, schema.ExportedProgram, MODEL)
