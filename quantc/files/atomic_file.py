"""Atomic file writes. Everything quantc writes goes through here.

A draft is written beside the file under a unique name and locked meanwhile: a draft whose lock is free was left by a
process that died, and the next save to the same path removes it.
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
"""Characters of the file's name used in its draft's: file names may not exceed 255 bytes."""
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
TOKEN = 8
"""Random bytes in the name of a draft."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft to write to. It replaces `path` atomically, and is flushed to disk, when the context exits without an
    error; otherwise the previous file stays. Symbolic links are followed. Raise SaveError if the file cannot be
    written."""
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
        with suppress(OSError):  # the error has been reported
            draft.unlink(missing_ok=True)
        os.close(lock)
    _flush_folder(place.parent)


def write_text(path: Path, text: str) -> None:
    """Write text to a file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes to a file atomically."""
    with whole_file(path) as draft:
        draft.write_bytes(content)


def check_writable(path: Path, *, makes_folders: bool = False) -> None:
    """Raise SaveError if a file could not be written, before the work whose result goes there. With `makes_folders`
    missing folders will be created, and the nearest existing one is checked."""
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
    """The path with all links resolved."""
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():  # a device or a folder: replacing it would remove it
        raise _unwritten(path, "it is there, and is no file")
    return place


def _draft(place: Path) -> tuple[Path, int]:
    """A new draft, and a descriptor that holds its lock. Its mode is that of the file to replace, or the default."""
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
        draft.unlink(missing_ok=True)  # removed as stale before it was locked
        os.close(lock)


def _take_mode(descriptor: int, of: Path) -> None:
    if sys.platform != "win32":
        os.fchmod(descriptor, stat.S_IMODE(of.stat().st_mode))


class Lock(Enum):
    """Result of trying to lock a draft."""

    MINE = "mine"
    TAKEN = "somebody else has it"
    NONE = "there are no locks here"


def _lock(descriptor: int) -> Lock:
    """Lock a draft; the system releases the lock when the process ends."""
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
    """Remove the drafts of `place` whose processes have died."""
    mine = re.compile(re.escape(_stem(place)) + rf"[0-9a-f]{{{2 * TOKEN}}}\.draft")
    try:
        names = [name for name in os.listdir(place.parent) if mine.fullmatch(name)]
    except OSError:
        return  # an unlistable folder: stale drafts do no harm
    for name in names:
        with suppress(OSError):  # of another user, or gone by now
            descriptor = os.open(place.with_name(name), os.O_RDWR | NO_LINK)
            try:
                if _lock(descriptor) is Lock.MINE:
                    os.unlink(place.with_name(name))
            finally:
                os.close(descriptor)


def _stem(place: Path) -> str:
    return f".{place.name[:LONGEST]}."


def _flush(draft: Path, lock: int) -> None:
    """Flush a draft to disk. If another file has been put in its place, that one is given the draft's mode."""
    with open(draft, "r+b") as file:
        if sys.platform != "win32" and not os.path.sameopenfile(file.fileno(), lock):
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(lock).st_mode))
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Flush the folder entry to disk, where the system supports it."""
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
