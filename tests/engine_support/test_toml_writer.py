"""Plain data written as TOML, which the standard library reads back."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantc.errors import ConfigError
from quantc.support.toml_writer import to_toml

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=5))
def test_any_mapping_reads_back(data: dict[str, Any]) -> None:
    assert repr(tomllib.loads(to_toml(data))) == repr(_in_order(data))


def _in_order(data: dict[str, Any]) -> dict[str, Any]:
    """Lists of mappings come last in the text."""

    def is_tables(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)

    return dict(sorted(data.items(), key=lambda item: is_tables(item[1])))


def test_lists_of_mappings_are_tables_and_what_is_nested_deeper_is_inline() -> None:
    assert to_toml({"rules": [{"use": "x", "more": {"a": [1]}}, {"use": "y"}], "n": 1}) == (
        'n = 1\n\n[[rules]]\nuse = "x"\nmore = { a = [1] }\n\n[[rules]]\nuse = "y"\n'
    )


def test_an_empty_list_is_not_part_of_the_table_before_it() -> None:
    data: dict[str, Any] = {"rules": [{"use": "x"}], "others": []}
    assert tomllib.loads(to_toml(data)) == data


def test_toml_that_cannot_be_written_is_refused() -> None:
    assert to_toml({"a": 1, "b": [True, 2.5], "c d": {"x": "\x7f\n"}}) == (
        'a = 1\nb = [true, 2.5]\n"c d" = { x = "\\u007f\\n" }\n'
    )
    with pytest.raises(ConfigError, match="cannot be written"):
        to_toml({"a": None})
