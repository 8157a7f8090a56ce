"""`qc.lower(..., tune=True)`: kernels are timed on this machine, on what they are really given, and the fastest stays.

What was measured is remembered in a file, by the work that was done, the kernel, the processor, the number of threads
and the version of torch. `QUANTC_CACHE` names another folder for it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import platformdirs
import torch
from torch import Tensor, fx

from quantc.errors import InputError
from quantc.kernels.choosing import Choice, by_times
from quantc.kernels.packed import Kernel
from quantc.progress import Style, showing

ROUNDS = 5
"""How often each kernel has its turn: the best of them counts, since a shared machine only ever adds time."""
SECONDS_A_TURN = 0.002
"""How long a turn lasts at least, by repeating the call."""
FILE = "kernel-times.json"


def cache_folder() -> Path:
    """Where measured times are kept."""
    return Path(os.environ.get("QUANTC_CACHE") or platformdirs.user_cache_dir("quantc"))


@cache
def processor() -> str:
    """The processor's name, and the instructions torch uses on it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@dataclass
class Times:
    """Measured times, in microseconds, and the file they are kept in."""

    path: Path = field(default_factory=lambda: cache_folder() / FILE)
    known: dict[str, float] = field(default_factory=dict)
    new: dict[str, float] = field(default_factory=dict)

    @classmethod
    def remembered(cls) -> Times:
        times = cls()
        times.known = _read(times.path)
        return times

    def key(self, kernel: Kernel, inputs: Sequence[Tensor]) -> str | None:
        """What the time of a kernel is remembered by; None if the kernel does not say what it has to do."""
        work = kernel.work(*inputs)
        if work is None:
            return None
        threads = torch.get_num_threads()
        return f"{processor()} | torch {torch.__version__}, {threads} threads | {kernel.name} | {work}"

    def get(self, key: str | None) -> float | None:
        return None if key is None else self.new.get(key, self.known.get(key))

    def put(self, key: str | None, microseconds: float) -> None:
        if key is not None:
            self.new[key] = round(microseconds, 2)

    def write(self) -> None:
        """Add what was measured to the file, which others may have written to in the meantime."""
        if not self.new:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({**_read(self.path), **self.new}, indent=1, sort_keys=True)
        with NamedTemporaryFile("w", encoding="utf-8", dir=self.path.parent, suffix=".tmp", delete=False) as file:
            file.write(content + "\n")
        os.replace(file.name, self.path)


def _read(path: Path) -> dict[str, float]:
    """The times in a file. One that cannot be read is as good as none: it is written anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(key): float(value) for key, value in found.items() if isinstance(value, int | float)}


def tune(
    module: fx.GraphModule,
    choices: dict[fx.Node, Choice],
    inputs: Sequence[Any] | None,
    put: Callable[[fx.Node, Kernel], None],
    progress: Style = "auto",
) -> dict[fx.Node, Choice]:
    """Run a module once, and time the candidates of each kernel on what it is given; `put` sets the fastest in.

    Gives the choices as they are now.
    """
    if inputs is None or any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in inputs):
        raise InputError(
            "there is nothing to time kernels on: the program has no example inputs",
            where="qc.lower(..., tune=True)",
            advice="give the inputs themselves, tune=(x,), as the model is called with",
        )
    times = Times.remembered()
    with showing("kernels timed", progress) as told, torch.no_grad():
        run = _Tuning(module, choices, put, times, told)
        run.run(*[leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in inputs], enable_io_processing=False)
    times.write()
    return run.choices


class _Tuning(fx.Interpreter):
    def __init__(
        self,
        module: fx.GraphModule,
        choices: dict[fx.Node, Choice],
        put: Callable[[fx.Node, Kernel], None],
        times: Times,
        told: Callable[[int, int | None], None],
    ) -> None:
        super().__init__(module)
        self.choices = dict(choices)
        self.put, self.times, self.told = put, times, told
        self.waiting = [node for node, choice in choices.items() if len(choice.candidates) > 1]
        self.done = 0

    def run_node(self, n: fx.Node) -> Any:
        choice = self.choices.get(n)
        if choice is not None and len(choice.candidates) > 1:
            args, _ = self.fetch_args_kwargs_from_env(n)
            self.choices[n] = made = fastest(choice.candidates, args, self.times)
            self.put(n, made.taken)
            self.done += 1
            self.told(self.done, len(self.waiting))
        return super().run_node(n)


def fastest(candidates: Sequence[Kernel], inputs: Sequence[Any], times: Times) -> Choice:
    """The choice by times on this machine: measured now, unless all of them are remembered."""
    keys = {kernel.name: times.key(kernel, inputs) for kernel in candidates}
    known = {name: time for name, key in keys.items() if (time := times.get(key)) is not None}
    work = candidates[0].work(*inputs)
    if len(known) == len(candidates):
        return by_times(candidates, "remembered", work, known)
    found = measure(candidates, inputs)
    for name, microseconds in found.items():
        times.put(keys[name], microseconds)
    return by_times(candidates, "measured", work, found)


def measure(kernels: Sequence[Kernel], inputs: Sequence[Any]) -> dict[str, float]:
    """The best time of each kernel, in microseconds; they take turns."""
    best = {kernel.name: float("inf") for kernel in kernels}
    given = [value.clone() if isinstance(value, Tensor) else value for value in inputs]  # a kernel may write over them
    repeats = {kernel.name: _repeats(kernel, given) for kernel in kernels}
    for _ in range(ROUNDS):
        for kernel in kernels:
            count = repeats[kernel.name]
            best[kernel.name] = min(best[kernel.name], _seconds(kernel, given, count) / count * 1e6)
    return best


def _repeats(kernel: Kernel, inputs: Sequence[Any]) -> int:
    """How often a kernel is called in a turn."""
    kernel(*inputs)  # packs the weights
    return max(1, int(SECONDS_A_TURN / max(_seconds(kernel, inputs, 1), 1e-7)))


def _seconds(kernel: Kernel, inputs: Sequence[Any], count: int) -> float:
    # the processor's time is not disturbed by others, but adds up that of all threads
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(count):
        kernel(*inputs)
    return clock() - start
