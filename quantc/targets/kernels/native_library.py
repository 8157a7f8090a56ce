"""quantc's own kernels in C++, one file each in `native/`: compiled at first use, kept in the user's cache, called by ctypes.

They need no header but the compiler's. A cached library is found by a digest of sources and flags, and written
atomically, so several processes may come here at once. Without a compiler, or with `QUANTC_NATIVE=0`, `native_library` says
why there is none, and other kernels run. `QUANTC_NATIVE=avx2` leaves AVX-512 aside, as do the settings that hold torch's own
engines to AVX2.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from quantc.errors import SaveError
from quantc.files.atomic_file import write_bytes
from quantc.targets.kernels.tuning import cache_folder

SWITCH = "QUANTC_NATIVE"
OFF = ("0", "off", "no", "false")
HELD_TO_AVX2 = ("FBGEMM_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
"""Settings of torch's engines that these kernels follow."""
COMPILERS = ("c++", "g++", "clang++")
COMMON = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-w")
FLAGS = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
}
MAX_SECONDS = 300
"""Of one compilation."""
POINTER, INT64, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "linear_w8": (*[POINTER] * 6, *[INT64] * 3, INT, POINTER),
    "linear_w4": (*[POINTER] * 4, *[INT64] * 4, *[INT] * 3, POINTER),
}
"""Arguments by function, as the sources have them; all yield an int."""


class NoNativeError(Exception):
    """The reason why there is no library. Internal: kernels turn it into the reason of a refusal."""


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library."""

    instructions: str
    """A key of `FLAGS`."""
    functions: dict[str, Any]
    parallel: int | None
    """Address of OpenMP's entry to a parallel region, in the copy that torch uses; None if there is none."""


def native_library() -> NativeLibrary:
    """The library for this processor, compiled if it is not cached; NoNativeError if there is none."""
    setting = os.environ.get(SWITCH, "").lower()
    if setting in OFF:
        raise NoNativeError(f"{SWITCH}={setting} switches quantc's own kernels off")
    found = _library(instructions(setting))
    if isinstance(found, str):
        raise NoNativeError(found)
    return found


def instructions(setting: str) -> str:
    """The instructions to compile for; empty if the processor lacks those that are needed."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    if capability not in FLAGS or sys.platform != "linux":
        return ""
    is_held = setting == "avx2" or any(os.environ.get(name, "").lower() == "avx2" for name in HELD_TO_AVX2)
    return "avx2" if is_held else capability


@cache
def _library(kind: str) -> NativeLibrary | str:
    """The loaded library, or the reason why there is none; asked once."""
    if not kind:
        return "quantc's own kernels need Linux on a processor with AVX2"
    path = cache_folder() / "native" / f"{digest(kind)}-{kind}.so"
    try:
        if not path.is_file():
            _compile(kind, path)
        _check_owner(path)
        library = ctypes.CDLL(str(path))
    except NoNativeError as error:
        return str(error)
    except OSError as error:
        return _told(f"{path} cannot be loaded: {error}")
    functions = {}
    for name, arguments in SIGNATURES.items():
        functions[name] = getattr(library, name)
        functions[name].argtypes, functions[name].restype = arguments, INT
    return LOADED.setdefault(kind, NativeLibrary(kind, functions, _parallel()))


LOADED: dict[str, NativeLibrary] = {}
"""By instructions."""


def sources() -> dict[str, bytes]:
    """Sources and headers, by name."""
    folder = resources.files("quantc.targets.kernels") / "native"
    files = (item for item in folder.iterdir() if item.name.endswith((".cpp", ".h")))
    return {item.name: item.read_bytes() for item in sorted(files, key=lambda item: item.name)}


def digest(kind: str) -> str:
    """What a library is made of, in short."""
    made = hashlib.sha256(repr((COMMON, FLAGS[kind])).encode())
    for name, content in sources().items():
        made.update(repr((name, content)).encode())
    return made.hexdigest()[:24]


def compiler() -> str:
    """Path of a C++ compiler: `CXX`, or one by its usual name; NoNativeError if there is none."""
    names = [name for name in (os.environ.get("CXX"), *COMPILERS) if name]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise NoNativeError("there is no C++ compiler for quantc's own kernels: install g++, or set CXX")
    return found


def _compile(kind: str, path: Path) -> None:
    """Compile the library, and put it in its place when it is whole."""
    command, files = compiler(), sources()
    with tempfile.TemporaryDirectory(prefix="quantc-native-") as name:
        folder = Path(name)
        for file, content in files.items():
            write_bytes(folder / file, content)
        made = folder / "library.so"
        written = [str(folder / file) for file in files if file.endswith(".cpp")]
        call = [command, *COMMON, *FLAGS[kind], *written, "-o", str(made)]
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=MAX_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoNativeError(_told(f"{command} did not compile quantc's own kernels: {error}")) from error
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            raise NoNativeError(_told(f"{command} did not compile quantc's own kernels: {lines[0] if lines else ''}"))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_bytes(path, made.read_bytes())
        except (OSError, SaveError) as error:
            raise NoNativeError(_told(f"quantc's own kernels cannot be kept in {path.parent}: {error}")) from error


def _check_owner(path: Path) -> None:
    """Refuse to run code that others may have written."""
    state = path.stat()
    if state.st_uid not in (os.getuid(), 0) or state.st_mode & 0o002:
        raise NoNativeError(_told(f"{path} belongs to somebody else, or anybody may write to it: remove it"))


def _told(reason: str) -> str:
    """Warn of what a user did not choose."""
    warnings.warn(f"{reason}. Slower kernels run instead; {SWITCH}=0 switches these off", UserWarning, stacklevel=2)
    return reason


def _parallel() -> int | None:
    found = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return None if found is None else ctypes.cast(found, POINTER).value
