"""Classes with some of their arguments given: what configurations hold in place of instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any


class Constructor:
    """A callable that makes a new object at each call, with the arguments given so far.

    `p` is the `functools.partial` behind it, under the name that quantizers written for torch look it up by. Two are
    equal if they make the same thing of the same arguments.
    """

    def __init__(self, p: partial[Any], callable_args: Mapping[str, Callable[[], Any]] | None = None) -> None:
        self.p = p
        self.callable_args = dict(callable_args or {})

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        made = {name: make() for name, make in self.callable_args.items() if name not in keywords}
        return self.p(*args, **made, **keywords)

    def with_args(self, **keywords: Any) -> Constructor:
        """The same with more arguments given; the later ones win."""
        return Constructor(partial(self.p, **keywords), self.callable_args)

    def with_callable_args(self, **makers: Callable[[], Any]) -> Constructor:
        """The same with arguments that are made anew at each call."""
        return Constructor(self.p, {**self.callable_args, **makers})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constructor):
            return NotImplemented
        mine, theirs = self.p, other.p
        same = mine.func is theirs.func and mine.args == theirs.args and mine.keywords == theirs.keywords
        return same and self.callable_args == other.callable_args

    def __hash__(self) -> int:
        return hash((self.p.func, tuple(sorted(self.p.keywords))))

    def __repr__(self) -> str:
        given = [f"{name}={_show(value)}" for name, value in self.p.keywords.items()]
        given += [f"{name}={_show(make)}()" for name, make in self.callable_args.items()]
        return f"{_show(self.p.func)}({', '.join(given)})"


def _show(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


class Constructible:
    """A class of which configurations hold constructors."""

    @classmethod
    def with_args(cls, **keywords: Any) -> Constructor:
        """A constructor of this class with some arguments given: `MinMaxObserver.with_args(dtype=torch.qint8)`."""
        return Constructor(partial(cls, **keywords))

    @classmethod
    def with_callable_args(cls, **makers: Callable[[], Any]) -> Constructor:
        """A constructor of this class, some of whose arguments are made anew at each call."""
        return Constructor(partial(cls), makers)
