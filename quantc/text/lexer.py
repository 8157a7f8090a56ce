"""Tokenizer and recursive descent parser for the literals of dump text, one line at a time.

Nothing is evaluated: a token is looked up or converted, or it is an error with its line and column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NoReturn, Protocol

import torch
from torch import fx

from quantc.errors import ParseError, UnknownNameError
from quantc.ir.types import DTYPES, TensorType, TupleType, ValueType, parse_type
from quantc.text.literals import Opaque
from quantc.text.target_names import resolve

DEPTH = 50
"""Maximum nesting of brackets. Real programs stay below ten."""

DIGITS = 4000
"""Maximum length of an integer literal; Python refuses to convert much longer ones."""

_TOKEN = re.compile(
    r"""
      (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<node>%\w+)
    | (?P<reference>@(?:[\w.\-/]+|"(?:[^"\\]|\\.)*"))
    | (?P<digest>\#[0-9a-f]{8}(?!\w))
    | (?P<comment>\#.*)
    | (?P<number>-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf)(?!\w))
    | (?P<ellipsis>\.\.\.)
    | (?P<method>\.\w+)
    | (?P<word>[A-Za-z_][\w.]*(?::[\w.<>]+)?)
    | (?P<punctuation>[()\[\]{},=:&*])
    """,
    re.VERBOSE | re.ASCII,
)
_SPACE = re.compile(r"[ \t]*")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    start: int


class Scope(Protocol):
    """Name resolution for a line. Both methods raise through `reader.fail` for unknown names."""

    def node(self, name: str, reader: Reader, at: int) -> Any: ...

    def graph_node(self, name: str, reader: Reader, at: int) -> Any: ...


class NoScope:
    """For contexts where only literals are allowed."""

    def node(self, name: str, reader: Reader, at: int) -> NoReturn:
        reader.fail(f"%{name} may not stand here: only literals may", at=at)

    def graph_node(self, name: str, reader: Reader, at: int) -> NoReturn:
        reader.fail(f"@{name} may not stand here: only literals may", at=at)


@dataclass
class Reader:
    """Parses one line. `text` is the whole dump, for messages."""

    text: str
    line: str
    number: int
    scope: Scope = field(default_factory=NoScope)
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    position: int = 0
    _ahead: tuple[int, Token] | None = None
    """The last position peeked at and its token: most tokens are peeked at several times."""

    def fail(self, what: str, *, at: int | None = None, advice: str | None = None) -> NoReturn:
        column = (self.position if at is None else at) + 1
        raise ParseError(what, text=self.text, line=self.number, column=column, advice=advice)

    # -- tokens ----------------------------------------------------------------------------------------------

    def peek(self) -> Token:
        """The next token; its kind is "end" at the end of the line."""
        if self._ahead is None or self._ahead[0] != self.position:
            self._ahead = (self.position, self._scan())
        return self._ahead[1]

    def _scan(self) -> Token:
        space = _SPACE.match(self.line, self.position)
        start = space.end() if space is not None else self.position
        if start >= len(self.line):
            return Token("end", "", start)
        found = _TOKEN.match(self.line, start)
        if found is None:
            self.fail(f"{self.line[start]!r} does not belong here", at=start)
        return Token(str(found.lastgroup), found.group(), start)

    def take(self) -> Token:
        token = self.peek()
        self.position = token.start + len(token.text)
        return token

    def expect(self, *kinds: str, what: str) -> Token:
        """Consume the next token, which must be of one of these kinds."""
        token = self.peek()
        if token.kind not in kinds:
            self._unexpected(what, token)
        return self.take()

    def _unexpected(self, what: str, token: Token) -> NoReturn:
        found = "the line ends" if token.kind == "end" else f"there is {token.text!r}"
        self.fail(f"expected {what}, but {found}", at=token.start)

    def accept(self, text: str) -> bool:
        """Consume the next token if its text matches."""
        token = self.peek()
        if token.text != text:
            return False
        self.take()
        return True

    def require(self, text: str) -> None:
        if not self.accept(text):
            self._unexpected(repr(text), self.peek())

    def end(self) -> None:
        self.expect("end", what="the end of the line")

    def end_or_comment(self) -> None:
        if self.peek().kind != "comment":
            self.end()

    def string(self) -> str:
        return self._unquote(self.expect("string", what="a string in double quotes"))

    def _unquote(self, token: Token) -> str:
        try:
            return str(json.loads(token.text[token.text.index('"') :]))
        except ValueError:
            self.fail(f"{token.text} is not a string", at=token.start, advice="strings are quoted as in JSON")

    def reference(self) -> str:
        """Parse `@name` or `@"any name"`."""
        return self._name(self.expect("reference", what="a reference such as @true_graph_0"))

    def _name(self, token: Token) -> str:
        return self._unquote(token) if token.text.startswith('@"') else token.text[1:]

    def digest(self) -> str | None:
        """Parse the digest of a constant, if one stands here: `#9f2c01ab`."""
        token = self.peek()
        if token.kind == "digest":
            return self.take().text[1:]
        if token.kind == "comment" and token.text[1:2].strip():
            self.fail(
                f"{token.text.split()[0]!r} is not a digest",
                at=token.start,
                advice="a digest has eight hex digits, 0-9 and a-f; a comment begins with '# '",
            )
        return None

    def type(self) -> ValueType | None:
        """Parse a type; it ends at the first space outside brackets."""
        start = self.peek().start
        depth = 0
        end = start
        while end < len(self.line) and not (depth == 0 and self.line[end] in " \t"):
            depth += (self.line[end] in "([{") - (self.line[end] in ")]}")
            if depth > DEPTH:
                self.fail("this type nests too deeply", at=start)
            end += 1
        try:
            kind = _type(self.line[start:end])
        except ValueError as error:
            self.fail(str(error), at=start)
        if not _is_sound(kind):
            self.fail("a type with an empty dimension", at=start)
        self.position = end
        return kind

    # -- literals --------------------------------------------------------------------------------------------

    def value(self, depth: int = 0) -> Any:
        """Parse one literal, node or reference."""
        token = self.take()
        if depth > DEPTH:
            self.fail("values nest too deeply", at=token.start)
        match token.kind:
            case "string":
                return self._unquote(token)
            case "number":
                return self._number(token)
            case "ellipsis":
                return ...
            case "node":
                return self.scope.node(token.text[1:], self, token.start)
            case "reference":
                return self.scope.graph_node(self._name(token), self, token.start)
            case "word":
                return self._word(token, depth)
            case _:
                return self._bracket(token, depth)

    def callee(self, token: Token) -> Callable[..., Any]:
        """The op or function of that name."""
        try:
            return resolve(token.text, self.functions)
        except UnknownNameError as error:
            self.fail(error.what, at=token.start, advice=error.advice)

    def _number(self, token: Token) -> int | float:
        if not token.text.lstrip("-").isdigit():
            return float(token.text)
        if len(token.text) > DIGITS:
            self.fail("this number has too many digits", at=token.start)
        return int(token.text)

    def _bracket(self, token: Token, depth: int) -> Any:
        if token.text == "&":
            return self.callee(self.expect("word", what="the name of an op"))
        if token.text not in _CLOSING:
            self._unexpected("a value", token)
        if token.text == "{":
            return self._dict(token, depth)
        items, had_comma = self._items(_CLOSING[token.text], depth)
        if token.text == "[":
            return items
        if len(items) == 1 and not had_comma:
            self.fail("a tuple of one is written (value,)", at=token.start)
        return tuple(items)

    def _items(self, closing: str, depth: int) -> tuple[list[Any], bool]:
        """Values up to a bracket, and whether there was a trailing comma."""
        items: list[Any] = []
        while not self.accept(closing):
            items.append(self.value(depth + 1))
            if not self.accept(","):
                self.require(closing)
                return items, False
        return items, bool(items)

    def _dict(self, token: Token, depth: int) -> dict[Any, Any]:
        rows: dict[Any, Any] = {}
        while not self.accept("}"):
            key = self.value(depth + 1)
            if isinstance(key, fx.Node | list | dict | slice | tuple):
                self.fail("this cannot be the key of a dictionary", at=token.start)
            self.require(":")
            rows[key] = self.value(depth + 1)
            if not self.accept(","):
                self.require("}")
                break
        return rows

    def _word(self, token: Token, depth: int) -> Any:
        if token.text in _WORDS:
            return _WORDS[token.text]
        named = _torch_names().get(token.text)
        if named is not None:
            return named
        make = _FORMS.get(token.text)
        if make is None:
            self.fail(f"{token.text!r} is not a value", at=token.start, advice="text is written in double quotes")
        self.require("(")
        items, _ = self._items(")", depth)
        try:
            return make(*items)
        except (TypeError, ValueError, RuntimeError) as error:
            self.fail(f"not a {token.text}: {str(error).splitlines()[0]}", at=token.start)


def _complex(real: float, imag: float) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise TypeError("both parts are written as floats")
    return complex(real, imag)


def _device(name: str) -> torch.device:
    if not isinstance(name, str):
        raise TypeError("a device has a name")
    return torch.device(name)


def _opaque(kind: str) -> Opaque:
    if not isinstance(kind, str):
        raise TypeError("its kind is a string")
    return Opaque(kind)


def _slice(start: Any, stop: Any, step: Any) -> slice:
    return slice(start, stop, step)


_FORMS: dict[str, Callable[..., Any]] = {
    "complex": _complex,
    "slice": _slice,
    "range": range,
    "device": _device,
    "opaque": _opaque,
}
_WORDS: dict[str, Any] = {
    "True": True,
    "False": False,
    "None": None,
    "inf": float("inf"),
    "nan": float("nan"),
    **DTYPES,
}


@cache
def _torch_names() -> dict[str, Any]:
    """`torch.channels_last`, `torch.strided`, `torch.qint8` and the like."""
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    return {str(value): value for value in vars(torch).values() if isinstance(value, kinds)}


@lru_cache(maxsize=4096)
def _type(text: str) -> ValueType | None:
    return parse_type(text)


def _is_sound(kind: ValueType | None) -> bool:
    if isinstance(kind, TupleType):
        return all(_is_sound(item) for item in kind.items)
    return not isinstance(kind, TensorType) or all(size != "" for size in kind.shape)
