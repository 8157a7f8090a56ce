"""Choices within a pattern: one op of several, an optional part, the length of a list.

Every option is shown by at least one model, with all others at their first option: the number of models grows with the
sum of the options, not with their product. Where an option does not go with the first option of another (a conv2d and a
max_pool1d), it is tried with each of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from quantc.errors import QuantcError

T = TypeVar("T")
Taken = Mapping[str, int]


class NoExampleError(QuantcError):
    """A pattern, or one combination of choices, for which no model can be made."""


@dataclass
class Choices:
    """One combination of choices in a pattern. Undecided ones take the first option."""

    decided: Taken = field(default_factory=dict)
    met: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Every choice that came up, and its options in words."""
    lenient: set[str] = field(default_factory=set)
    """Choices between presence and absence, where an op may not go without."""

    def is_absent(self, name: str) -> bool:
        """True to omit an optional operand."""
        self.lenient.add(name)
        return self.take(name, f"with {name}", f"without {name}") == 1

    def take(self, choice: str, *options: str) -> int:
        """Index of the option to take."""
        self.met.setdefault(choice, options)
        return min(self.decided.get(choice, 0), len(options) - 1)

    @property
    def taken(self) -> dict[str, int]:
        return {choice: self.take(choice, *options) for choice, options in self.met.items()}

    def __str__(self) -> str:
        """Differences from the first options."""
        words = [options[number] for choice, options in self.met.items() if (number := self.decided.get(choice, 0))]
        return ", ".join(words)


@dataclass(frozen=True)
class Unshown:
    """An option that no model shows, and why."""

    option: str
    error: NoExampleError


@dataclass
class Explored(Generic[T]):
    """Models for the combinations of a pattern, and the options that could not be shown."""

    made: list[tuple[Choices, T]] = field(default_factory=list)
    unshown: list[Unshown] = field(default_factory=list)


def explore(make: Callable[[Choices], T]) -> Explored[T]:
    """Call `make` until each option of each choice has succeeded once."""
    found: Explored[T] = Explored()
    options: dict[str, tuple[str, ...]] = {}
    shown: set[tuple[str, int]] = set()
    failed: dict[tuple[str, int], tuple[Choices, NoExampleError]] = {}
    pending: list[dict[str, int]] = [{}]

    def attempt(decided: Taken) -> NoExampleError | None:
        choices = Choices(decided)
        try:
            found.made.append((choices, make(choices)))
        except NoExampleError as error:
            failed.update({pair: (choices, error) for pair in choices.taken.items() if pair not in shown})
            return error
        else:
            shown.update(choices.taken.items())
            return None
        finally:
            new = {choice: words for choice, words in choices.met.items() if choice not in options}
            options.update(new)
            pending.extend({**decided, choice: n} for choice, words in new.items() for n in range(1, len(words)))

    first = None
    while pending:
        error = attempt(pending.pop(0))
        first = first or error
    for pair, (choices, _) in list(failed.items()):
        for decided in _neighbours(choices, pair):
            if pair in shown or attempt(decided) is None:
                break
    found.unshown = [
        Unshown(options[choice][number], failed[choice, number][1])
        for choice, number in failed
        if (choice, number) not in shown and choice not in failed[choice, number][0].lenient
    ]
    if first is not None and not found.made and not found.unshown:
        found.unshown = [Unshown("the pattern", first)]
    return found


def _neighbours(choices: Choices, kept: tuple[str, int]) -> Iterator[dict[str, int]]:
    """The ways that differ from a failed one in one other choice."""
    base = {**choices.decided, kept[0]: kept[1]}
    for choice, words in choices.met.items():
        if choice != kept[0]:
            yield from ({**base, choice: number} for number in range(len(words)) if number != base.get(choice, 0))
