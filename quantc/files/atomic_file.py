"""Files that are written whole or not at all. Everything quantc writes goes through here.

A draft lies beside the file under a name of its own, and is locked while it is written: a draft whose lock can be taken was
left by a process that died, and the next save to the same path removes it.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from quantc.errors import SaveError

if sys.platform != "win32":
    import fcntl

LONGEST = 100
"""Characters of a file's name that its draft has: names may not be longer than 255 bytes."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
TOKEN = 8
"""Bytes of chance in the name of a draft."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft to write to. It takes the place of `path` when the block ends well, at once and on disk; otherwise the file
    that was there before stays as it was. A link is followed: what it leads to is written. SaveError if it cannot be."""
    try:
        place = _place(path)
        _remove_stale(place)
        draft, lock = _draft(place)
    except OSError as error:
        raise _unwritten(path, error.strerror or str(error)) from error
    try:
        yield draft
        _flush(draft, lock)
        os.replace(draft, place)
    except OSError as error:
        raise _unwritten(path, error.strerror or str(error)) from error
    finally:
        with suppress(OSError):  # whatever went wrong has been told
            draft.unlink(missing_ok=True)
        os.close(lock)
    _flush_folder(place.parent)


def write_text(path: Path, text: str) -> None:
    """Write text to a file, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes to a file, whole or not at all."""
    with whole_file(path) as draft:
        draft.write_bytes(content)


def check_writable(path: Path, *, makes_folders: bool = False) -> None:
    """SaveError if a file could not be written, before the work is done that is to end there. `makes_folders`: those that
    are missing will be made, and the nearest that is there counts."""
    try:
        place = _place(path)
        folder = place.parent
        while makes_folders and not folder.exists():
            folder = folder.parent
        draft, lock = _draft(folder / place.name)
        os.close(lock)
        draft.unlink()
    except OSError as error:
        raise _unwritten(path, error.strerror or str(error)) from error


def _place(path: Path) -> Path:
    """Where the file lies, behind all links."""
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():  # a device or a folder: to put a file in its place would be to remove it
        raise _unwritten(path, "it is there, and is no file")
    return place


def _draft(place: Path) -> tuple[Path, int]:
    """A new draft, and a descriptor that holds its lock. It has the mode of the file it is to replace, or that of any
    new file."""
    while True:
        draft = place.with_name(f"{_stem(place)}{secrets.token_hex(TOKEN)}.draft")
        lock = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        try:
            if place.exists():
                _take_mode(lock, place)
            if _lock(lock) is not Lock.TAKEN and os.fstat(lock).st_nlink:
                return draft, lock
        except OSError:
            draft.unlink(missing_ok=True)
            os.close(lock)
            raise
        draft.unlink(missing_ok=True)  # taken for stale before it was locked
        os.close(lock)


def _take_mode(descriptor: int, of: Path) -> None:
    if sys.platform != "win32":
        os.fchmod(descriptor, stat.S_IMODE(of.stat().st_mode))


class Lock(Enum):
    """What came of asking for the lock of a draft."""

    MINE = "mine"
    TAKEN = "somebody else has it"
    NONE = "there are no locks here"


def _lock(descriptor: int) -> Lock:
    """Take the lock of a draft, which the system gives back when the process ends."""
    if sys.platform == "win32":
        return Lock.NONE
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.TAKEN
    except OSError:
        return Lock.NONE
    return Lock.MINE


def _remove_stale(place: Path) -> None:
    """Remove drafts of `place` that processes left which are no more."""
    mine = re.compile(re.escape(_stem(place)) + rf"[0-9a-f]{{{2 * TOKEN}}}\.draft")
    try:
        names = [name for name in os.listdir(place.parent) if mine.fullmatch(name)]
    except OSError:
        return  # a folder that cannot be listed: drafts in it are not in the way
    for name in names:
        with suppress(OSError):  # somebody else's, or gone by now
            descriptor = os.open(place.with_name(name), os.O_RDWR | NO_LINK)
            try:
                if _lock(descriptor) is Lock.MINE:
                    os.unlink(place.with_name(name))
            finally:
                os.close(descriptor)


def _stem(place: Path) -> str:
    return f".{place.name[:LONGEST]}."


def _flush(draft: Path, lock: int) -> None:
    """Bring a draft to the disk. Somebody may have put another file in its place: it gets the draft's mode."""
    with open(draft, "r+b") as file:
        if sys.platform != "win32" and not os.path.sameopenfile(file.fileno(), lock):
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(lock).st_mode))
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Bring the new name to the disk, where folders can be flushed."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _unwritten(path: Path, why: str) -> SaveError:
    return SaveError(
        f"{path} cannot be written: {why}",
        where=str(path),
        advice="give a path in a folder that exists and can be written to, on a disk with room for it",
    )
