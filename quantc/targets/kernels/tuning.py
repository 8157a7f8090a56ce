"""`qc.lower(..., tune=True)`: kernel selection by timing on this machine, on real inputs.

Kernels are timed in place: the whole module runs repeatedly, each time with other candidates. A kernel called alone in
a loop finds its code and weight in the cache, which other ops of a module evict; on ResNet-18 that reverses the ranking
of two kernels.

Times are cached in a file, keyed by workload, kernel, processor, number of threads and torch version. `QUANTC_CACHE`
names another folder for it.
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import Tensor, fx

from quantc.errors import InputError, LoadError, SaveError
from quantc.files.atomic_file import check_writable, write_text
from quantc.files.regular_file import read_text
from quantc.files.sealed_data import parse_json, seal, unseal
from quantc.support.progress import Style, show_progress
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.selection import By, Choice, by_times

TURNS = 10
"""Timed rounds for each kernel, after a warm-up round that packs weights."""
COUNTS = 4
"""Reciprocal of the fraction of times that count, the lowest: a shared machine only ever adds time, but the best alone
is luck."""
FILE = "kernel-times.json"
FORMAT = "quantc.kernel-times"
MAX_CACHE = 256 << 20
"""Bytes of the largest file of times that is read."""


def cache_folder() -> Path:
    """Folder of cached times."""
    return Path(os.environ.get("QUANTC_CACHE") or platformdirs.user_cache_dir("quantc"))


@cache
def processor() -> str:
    """Processor name, and the instruction set torch uses on it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@dataclass
class Times:
    """Measured times in microseconds, and their cache file."""

    path: Path = field(default_factory=lambda: cache_folder() / FILE)
    known: dict[str, float] = field(default_factory=dict)
    new: dict[str, float] = field(default_factory=dict)
    is_kept: bool = True
    """False once writing the file has failed."""

    @classmethod
    def remembered(cls) -> Times:
        times = cls()
        times.known = times.read()
        return times

    def read(self) -> dict[str, float]:
        """Times in the cache file. A file that is damaged or of an earlier quantc is ignored and rewritten."""
        if not self.path.exists():
            return {}
        try:
            found = parse_json(read_text(self.path, "remove it", most=MAX_CACHE), most=MAX_CACHE)
            return _times(unseal(found, needed=True) if isinstance(found, dict) else found)
        except LoadError as error:
            warnings.warn(
                f"{self.path} is not used: {error.what}. Kernels are timed again, and it is written anew",
                UserWarning,
                stacklevel=3,
            )
            return {}

    def key(self, kernel: Kernel, inputs: Sequence[Tensor]) -> str | None:
        """Cache key of a kernel's time; None if the kernel does not state its workload."""
        work = kernel.work(*inputs)
        return None if work is None else self.key_of(kernel.name, str(work))

    def key_of(self, what: str, work: str) -> str:
        """Cache key of any measurement."""
        threads = torch.get_num_threads()
        versions = f"quantc {version('quantc')}, torch {torch.__version__}, {threads} threads"
        return f"{processor()} | {versions} | {what} | {work}"

    def get(self, key: str | None) -> float | None:
        return None if key is None else self.new.get(key, self.known.get(key))

    def put(self, key: str | None, microseconds: float) -> None:
        if key is not None:
            self.new[key] = round(float(microseconds), 2)

    def check(self) -> None:
        """Warn before a long measurement if the cache file cannot be written."""
        try:
            check_writable(self.path, makes_folders=True)
        except SaveError as error:
            self._lose(error.what)

    def write(self) -> None:
        """Merge new times into the cache file, which other processes may have written meanwhile."""
        if not self.new or not self.is_kept:
            return
        content = seal({"format": FORMAT, "times": {**self.read(), **self.new}})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(content, indent=1, sort_keys=True) + "\n")
        except (OSError, SaveError) as error:
            self._lose(str(error.strerror) if isinstance(error, OSError) else error.what)

    def _lose(self, why: str) -> None:
        self.is_kept = False
        warnings.warn(
            f"the times of kernels are not kept in {self.path}: {why}. They are measured again next time; "
            "QUANTC_CACHE names another folder",
            UserWarning,
            stacklevel=2,
        )


def _times(data: Any) -> dict[str, float]:
    times = data.get("times") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if not isinstance(times, dict) or not all(isinstance(time, float) and time >= 0 for time in times.values()):
        raise LoadError("it holds no times of kernels", advice="remove it")
    return times


def check_inputs(inputs: Sequence[Any] | None) -> Sequence[Any]:
    """InputError if kernels cannot be timed on these inputs."""
    if inputs is None or any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in inputs):
        raise InputError(
            "there is nothing to time kernels on: the program has no example inputs",
            where="qc.lower(..., tune=True)",
            advice="give the inputs themselves, tune=(x,), as the model is called with",
        )
    return inputs


def tune(
    module: fx.GraphModule,
    choices: dict[fx.Node, Choice],
    inputs: Sequence[Any] | None,
    put: Callable[[fx.Node, Kernel], None],
    progress: Style = "auto",
) -> dict[fx.Node, Choice]:
    """Time each op's candidates as the module runs, unless all are cached; `put` installs the fastest.

    Returns the updated choices. Kernels in branches are not timed: how often they run is unknown.
    """
    leaves = check_inputs(inputs)
    open_choices = {node: choice for node, choice in choices.items() if len(choice.candidates) > 1}
    if not open_choices:
        return choices
    times = Times.remembered()
    with show_progress("turns taken", progress) as told, torch.no_grad():
        turns = _Turns(module, open_choices, leaves)
        seen = turns.take({node: choice.taken for node, choice in open_choices.items()})
        keys = {node: _keys(open_choices[node].candidates, given.inputs, times) for node, given in seen.items()}
        left = [node for node in seen if any(times.get(key) is None for key in keys[node].values())]
        if left:
            times.check()
        for node, found in (measure(turns, left, told) if left else {}).items():
            for name, microseconds in found.items():
                times.put(keys[node][name], microseconds)
    times.write()
    made: dict[fx.Node, Choice] = dict(choices)
    for node, given in seen.items():
        candidates = open_choices[node].candidates
        found = {name: time for name, key in keys[node].items() if (time := times.get(key)) is not None}
        by: By = "measured" if node in left else "remembered"
        made[node] = by_times(candidates, by, candidates[0].work(*given.inputs), found)
    for node in open_choices:
        put(node, made[node].taken)
    return made


def _keys(candidates: Sequence[Kernel], inputs: Sequence[Any], times: Times) -> dict[str, str]:
    """Cache keys of kernels' times; unique ones for kernels that do not state their workload."""
    return {kernel.name: times.key(kernel, inputs) or f"unknown work of {id(kernel)}" for kernel in candidates}


@dataclass(frozen=True, slots=True)
class TimedArguments:
    """Inputs of one kernel call, and its time."""

    inputs: tuple[Any, ...]
    microseconds: float


class _Turns(fx.Interpreter):
    """Runs a module with some of its kernels exchanged, and notes how long each takes."""

    def __init__(self, module: fx.GraphModule, choices: dict[fx.Node, Choice], inputs: Sequence[Any]) -> None:
        super().__init__(module)
        self.choices, self.inputs = choices, inputs
        self.kernels: dict[fx.Node, Kernel] = {}
        # CPU time is not affected by other processes, but sums over all threads
        self.clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self.seen: dict[fx.Node, TimedArguments] = {}

    def take(self, kernels: dict[fx.Node, Kernel]) -> dict[fx.Node, TimedArguments]:
        """Run once with these kernels."""
        self.kernels, self.seen = kernels, {}
        leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self.inputs]
        self.run(*leaves, enable_io_processing=False)
        return self.seen

    def run_node(self, n: fx.Node) -> Any:
        kernel = self.kernels.get(n)
        if kernel is None:
            return super().run_node(n)
        inputs = tuple(self.fetch_args_kwargs_from_env(n)[0])
        start = self.clock()
        made = kernel(*inputs)
        self.seen[n] = TimedArguments(inputs, 1e6 * (self.clock() - start))
        return made


def measure(
    turns: _Turns, nodes: Sequence[fx.Node], told: Callable[[int, int | None], None]
) -> dict[fx.Node, dict[str, float]]:
    """Times of all candidates of nodes, in microseconds.

    All candidates of a node get equally many turns, in random order, so that each runs next to varying neighbours.
    """
    samples: dict[fx.Node, dict[str, list[float]]] = {node: {} for node in nodes}
    chance = random.Random(0)
    most = max((len(turns.choices[node].candidates) for node in nodes), default=0)
    for block in range(TURNS + 1):
        orders = {
            node: chance.sample(choice.candidates, len(choice.candidates)) for node, choice in turns.choices.items()
        }
        for turn in range(most):
            taken = {node: order[turn % len(order)] for node, order in orders.items()}
            seen = turns.take(taken)
            for node in nodes if block else ():
                samples[node].setdefault(taken[node].name, []).append(seen[node].microseconds)
        told(block, TURNS)
    return {node: {name: low(times) for name, times in found.items()} for node, found in samples.items()}


def low(times: Sequence[float]) -> float:
    """Mean of the lowest times."""
    lowest = sorted(times)[: max(1, len(times) // COUNTS)]
    return sum(lowest) / len(lowest)
