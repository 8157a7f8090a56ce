"""Choices within a pattern: every option is shown once, and what cannot be shown is named."""

from __future__ import annotations

from quantc.testing.choices import Choices, NoExampleError, explore


def test_exploring_names_what_cannot_be_shown() -> None:
    def make(choices: Choices) -> str:
        colour = ("red", "green", "blue")[choices.take("colour", "red", "green", "blue")]
        size = ("small", "large")[choices.take("size", "small", "large")]
        if colour == "blue" or (colour, size) == ("green", "small"):
            raise NoExampleError(f"no {size} {colour}")
        return f"{size} {colour}"

    explored = explore(make)
    assert [made for _, made in explored.made] == ["small red", "large red", "large green"]
    assert [(gap.option, gap.error.what) for gap in explored.unshown] == [("blue", "no large blue")]


def test_what_is_undecided_takes_the_first_option() -> None:
    choices = Choices({"size": 1, "colour": 9})
    assert choices.take("shape", "round", "square") == 0
    assert choices.take("size", "small", "large") == 1
    assert choices.take("colour", "red", "green") == 1, "an option that is not there is the last"
    assert choices.taken == {"shape": 0, "size": 1, "colour": 1}


def test_a_way_is_told_by_what_differs_from_the_first_options() -> None:
    choices = Choices({"size": 1})
    choices.take("shape", "round", "square")
    choices.take("size", "small", "large")
    assert str(choices) == "large"
    assert str(Choices()) == ""


def test_every_option_is_shown_with_the_others_at_their_first() -> None:
    def make(choices: Choices) -> tuple[int, int]:
        return choices.take("one", "a", "b", "c"), choices.take("two", "x", "y")

    assert [made for _, made in explore(make).made] == [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_choices_that_come_up_only_in_some_ways_are_followed() -> None:
    def make(choices: Choices) -> str:
        if choices.take("kind", "plain", "rich") == 0:
            return "plain"
        return ("rich", "very rich")[choices.take("how", "little", "much")]

    assert [made for _, made in explore(make).made] == ["plain", "rich", "very rich"]


def test_an_optional_operand_that_an_op_may_not_go_without_is_no_gap() -> None:
    def make(choices: Choices) -> str:
        if choices.is_absent("b"):
            raise NoExampleError("it needs b")
        return "with b"

    explored = explore(make)
    assert [made for _, made in explored.made] == ["with b"]
    assert explored.unshown == []


def test_a_pattern_of_which_nothing_can_be_made_is_named_as_a_whole() -> None:
    def make(choices: Choices) -> str:
        raise NoExampleError("not at all")

    (gap,) = explore(make).unshown
    assert (gap.option, gap.error.what) == ("the pattern", "not at all")
