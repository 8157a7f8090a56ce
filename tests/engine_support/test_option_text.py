"""The text of pipelines and options: what is read, what is written, and where a fault is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantc.errors import ParseError
from quantc.support.option_text import Value, place, pointer, read, spell

TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    ["none", "true", "1", "-1e5", "nan", "inf", 'a"b', "a\\", "a,b", "{}", "[", "x=y", " ", "\n", "é", "layer1.*", "-"]
)


VALUES: st.SearchStrategy[Value] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)


@given(VALUES)
def test_any_value_reads_back_with_its_type(value: Value) -> None:
    (call,) = read(f"a{{x={spell(value)}}}")
    assert repr(call.options[0].value) == repr(value)


@given(st.text(alphabet='ab1-_.,={}[]" \\\n', max_size=30))
def test_any_text_reads_or_is_refused_with_its_place(text: str) -> None:
    faults: list[ParseError] = []
    try:
        read(text)
    except ParseError as error:
        faults.append(error)
    for fault in faults:
        assert 1 <= fault.line <= text.count("\n") + 1
        assert 1 <= fault.column <= max(len(row) for row in text.split("\n")) + 1
        assert fault.advice


def options(text: str) -> dict[str, Value]:
    """The options of the one call in a text."""
    (call,) = read(f"a{{{text}}}")
    return {option.name: option.value for option in call.options}


def test_calls_have_names_options_and_places() -> None:
    first, second = read("canonicalize, fuse{rules=conv-bn}")
    assert (first.name, first.options, first.at) == ("canonicalize", (), 0)
    assert (second.name, second.at) == ("fuse", 14)
    (option,) = second.options
    assert (option.name, option.value, option.at, option.value_at) == ("rules", "conv-bn", 19, 25)
    assert read("  \n ") == []


def test_words_are_the_values_they_read_as() -> None:
    assert options("a=1 b=-2.5 c=1e3 d=true e=none f=x.* g=inf h=.5") == {
        "a": 1,
        "b": -2.5,
        "c": 1000.0,
        "d": True,
        "e": None,
        "f": "x.*",
        "g": float("inf"),
        "h": 0.5,
    }
    assert options('a="1" b="none"') == {"a": "1", "b": "none"}


def test_commas_brackets_and_braces_make_lists_and_mappings() -> None:
    assert options("a=1,2 b=[] c=[3] d=[[1,2],x] e={f=1,2 g={}}") == {
        "a": [1, 2],
        "b": [],
        "c": [3],
        "d": [[1, 2], "x"],
        "e": {"f": [1, 2], "g": {}},
    }


def test_values_are_spelled_as_short_as_they_read_back() -> None:
    spelled = {spell(value) for value in ([1, 2], [1], [], "x.*", "a b", "1", None, {"a b": [1, 2]})}
    assert spelled == {"1,2", "[1]", "[]", "x.*", '"a b"', '"1"', "none", '{"a b"=1,2}'}


@pytest.mark.parametrize(
    ("text", "told", "column"),
    [
        ("a{x=1", "never closed", 2),
        ("a{x=[1", "never closed", 5),
        ("a{x=1 x=2}", "'x' is given twice", 7),
        ("a{x}", "after option 'x'", 4),
        ("a{x=1,y=2}", "list of values", 8),
        ("a b", "after 'a'", 3),
        ("a,", "the name of a pass, found the end", 3),
        ('a{x="', "in quotes", 5),
        ("a{x=[1 2]}", "between the items", 8),
        (f"a{{x={'9' * 5000}}}", "5000 digits", 5),
    ],
)
def test_faults_are_told_with_their_column(text: str, told: str, column: int) -> None:
    with pytest.raises(ParseError, match=told) as caught:
        read(text)
    assert (caught.value.line, caught.value.column) == (1, column)


def test_offsets_are_lines_and_columns_from_one() -> None:
    text = "ab\ncd\n"
    assert [place(text, at) for at in range(7)] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1)]
    assert pointer(text, 4) == "line 2, column 2\n    cd\n     ^"
