"""The text form of pipelines: the grammar that `Pipeline.parse` reads and `str(pipeline)` writes.

    pipeline := [ call ("," call)* ]
    call     := word [ "{" option* "}" ]              options are separated by spaces
    option   := name "=" value ("," value)*           a comma makes a list: `sizes=2,3`
    value    := word | "quoted" | "[" [value ("," value)*] "]" | "{" option* "}"

A word that reads as a number, `true`, `false` or `none` is that value; any other word is a string. A string with other
characters in it, or that would read as one of those values, is quoted in JSON's syntax. Brackets write the lists that
commas cannot: empty, of one item, nested. Braces as a value are a mapping.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from quantc.errors import ParseError

Value = None | bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"]

WORD = re.compile(r"[A-Za-z0-9_.:/*+@%-]+")
INTEGER = re.compile(r"[+-]?\d+")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)")
SPACE = re.compile(r"\s*")
CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "none": None}
GRAMMAR = 'a pipeline looks like: canonicalize,fuse{rules=conv-bn,linear-bn},annotate{backend=x86 note="any text"}'


@dataclass(frozen=True, slots=True)
class Option:
    """One `name=value`; `at` and `value_at` are the offsets of the name and of the value in the text."""

    name: str
    value: Value
    at: int
    value_at: int


@dataclass(frozen=True, slots=True)
class PassText:
    """A pass or named pipeline with its options, as written; `at` is its offset in the text."""

    name: str
    options: tuple[Option, ...]
    at: int


def read(text: str) -> list[PassText]:
    """Parse pipeline text into calls. Raise ParseError, with line and column, on a syntax error."""
    return _Reader(text).pipeline()


def spell(value: Value) -> str:
    """The text of an option's value; the inverse of `read`."""
    if isinstance(value, list | tuple) and len(value) > 1:
        return ",".join(_spell_item(item) for item in value)
    return _spell_item(value)


def place(text: str, at: int) -> tuple[int, int]:
    """Line and column, both from 1, of an offset into a text."""
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def pointer(text: str, at: int) -> str:
    """The line of an offset with a caret below it, for the `where` of an error."""
    line, column = place(text, at)
    return f"line {line}, column {column}\n    {text.split(chr(10))[line - 1]}\n    {' ' * (column - 1)}^"


def _spell_item(value: Value) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return value if WORD.fullmatch(value) and _literal(value) is value else json.dumps(value)
    if isinstance(value, Mapping):
        return "{" + " ".join(f"{_spell_name(name)}={spell(item)}" for name, item in value.items()) + "}"
    return "[" + ",".join(_spell_item(item) for item in value) + "]"


def _spell_name(name: str) -> str:
    return name if WORD.fullmatch(name) else json.dumps(name)


def _literal(word: str) -> Value:
    """The value of a bare word."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    if INTEGER.fullmatch(word):
        return int(word)
    return float(word) if NUMBER.fullmatch(word) else word


class _Reader:
    """A recursive descent parser: each method parses one rule of the grammar and leaves the cursor after it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, what: str, at: int | None = None, advice: str = GRAMMAR) -> NoReturn:
        line, column = place(self.text, self.at if at is None else at)
        raise ParseError(what, text=self.text, line=line, column=column, advice=advice)

    def peek(self) -> str:
        """The next character that is not a space; empty at the end."""
        found = SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.text[self.at : self.at + 1]

    def seen(self) -> str:
        return repr(self.peek()) if self.peek() else "the end of the text"

    def take(self, char: str) -> bool:
        if self.peek() != char:
            return False
        self.at += 1
        return True

    def expect(self, char: str, why: str) -> None:
        if not self.take(char):
            self.fail(f"expected {char!r} {why}, found {self.seen()}")

    def pipeline(self) -> list[PassText]:
        if not self.peek():
            return []
        calls = [self.call()]
        while self.take(","):
            calls.append(self.call())
        if self.peek():
            self.fail(f"expected ',' and another pass after {calls[-1].name!r}, found {self.seen()}")
        return calls

    def call(self) -> PassText:
        self.peek()
        at = self.at
        name = self.word("the name of a pass")
        options = self.options() if self.take("{") else ()
        return PassText(name, options, at)

    def options(self) -> tuple[Option, ...]:
        """The options up to and including the closing brace; the opening one has been consumed."""
        found: dict[str, Option] = {}
        opened = self.at - 1
        while not self.take("}"):
            if not self.peek():
                self.fail("'{' is never closed", at=opened)
            option = self.option()
            if option.name in found:
                self.fail(f"option {option.name!r} is given twice", at=option.at, advice="give each option once")
            found[option.name] = option
        return tuple(found.values())

    def option(self) -> Option:
        self.peek()
        at = self.at
        name = self.quoted() if self.peek() == '"' else self.word("the name of an option")
        self.expect("=", f"after option {name!r}")
        self.peek()
        start = self.at
        items = [self.value()]
        while self.take(","):
            items.append(self.value())
            if self.peek() == "=":
                self.fail("found '=' in a list of values", advice="separate options by spaces: {first=1,2 second=3}")
        return Option(name, items if len(items) > 1 else items[0], at, start)

    def value(self) -> Value:
        match self.peek():
            case '"':
                return self.quoted()
            case "[":
                return self.bracket()
            case "{":
                self.at += 1
                return {option.name: option.value for option in self.options()}
            case _:
                return self.literal()

    def bracket(self) -> list[Value]:
        opened = self.at
        self.at += 1
        items: list[Value] = []
        while not self.take("]"):
            if not self.peek():
                self.fail("'[' is never closed", at=opened)
            if items:
                self.expect(",", "between the items of a list")
            items.append(self.value())
        return items

    def literal(self) -> Value:
        at = self.at
        word = self.word("a value")
        try:
            return _literal(word)
        except ValueError:
            # Python refuses to read integers of thousands of digits
            self.fail(f"a number of {len(word)} digits is too long", at=at)

    def word(self, what: str) -> str:
        self.peek()
        found = WORD.match(self.text, self.at)
        if found is None:
            self.fail(f"expected {what}, found {self.seen()}")
        self.at = found.end()
        return found[0]

    def quoted(self) -> str:
        start = self.at
        try:
            value, self.at = json.JSONDecoder().raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self.fail(f"text in quotes does not read: {error.msg}", at=start, advice='inside quotes write \\" and \\\\')
        return str(value)
