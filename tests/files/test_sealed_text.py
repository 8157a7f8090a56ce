"""Sealed text: its last line is a digest of all before it, which shows damage; a text without that line is not checked."""

from __future__ import annotations

import pytest

from quantc.errors import LoadError
from quantc.files.sealed_text import sealed_text, unsealed_text

TEXT = 'program "N"\n  input %x\n  output (%x,)\n'


@pytest.mark.parametrize("text", ["", "\n", "\n\n", "one line", TEXT, "é\t\r\n \u2028", "# sealed", "# sealed 0123\n"])
def test_what_was_sealed_comes_back_with_a_line_break_at_its_end(text: str) -> None:
    assert unsealed_text(sealed_text(text)) == (text if text.endswith("\n") else f"{text}\n")


def test_the_seal_is_the_last_line_and_a_comment() -> None:
    made = sealed_text(TEXT)
    assert made.startswith(TEXT)
    assert made.endswith("\n")
    *_, last = made.splitlines()
    assert last.startswith("# sealed ")
    assert len(last.split()[-1]) == 32
    assert made.count("\n") == TEXT.count("\n") + 1


def test_every_character_that_is_changed_or_left_out_is_told() -> None:
    made = sealed_text(TEXT)
    end = len(TEXT)
    for place in range(end):
        for other in ("", "~"):
            with pytest.raises(LoadError, match="changed since it was written") as caught:
                unsealed_text(made[:place] + other + made[place + 1 :])
            assert "remove its last line" in str(caught.value.advice)
    digit = made[-2]
    with pytest.raises(LoadError):
        unsealed_text(made[:-2] + ("0" if digit != "0" else "1") + "\n")


def test_the_last_line_break_may_be_lost() -> None:
    assert unsealed_text(sealed_text(TEXT).removesuffix("\n")) == TEXT


@pytest.mark.parametrize(
    "text",
    [
        "",
        TEXT,
        f"{TEXT}# sealed\n",
        f"{TEXT}# sealed 123\n",
        f"{TEXT}# sealed {'g' * 32}\n",
        sealed_text(TEXT) + "more\n",
    ],
)
def test_a_text_without_a_seal_at_its_end_is_taken_as_it_is(text: str) -> None:
    assert unsealed_text(text) == text


def test_a_text_can_be_sealed_twice() -> None:
    once = sealed_text(TEXT)
    assert unsealed_text(sealed_text(once)) == once
