"""Lazy, silent imports of ExecuTorch's packages."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from quantc.support.optional_dependency import extra

XNNPACK = "executorch.backends.xnnpack"


def package(name: str) -> Any:
    """A module of ExecuTorch; MissingDependencyError with the install command if there is none."""
    with quiet():
        return extra(name, "executorch", ".pte files, which ExecuTorch writes and runs")


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that suppresses foreign warnings: torchao's about libraries for other machines, and torch's about
    deprecated APIs that ExecuTorch still uses.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with suppress_warnings():
            yield
    finally:
        logging.disable(before)


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Context manager that suppresses warnings, but not logging."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def runtime() -> Any:
    """ExecuTorch's runtime, with kernels for quantized ops that no delegate took. It gets as many threads as torch has
    at the first use: delegates keep the number they were made with.
    """
    package("executorch.kernels.quantized")
    found = package("executorch.runtime").Runtime.get()
    library = package("executorch.extension.pybindings.portable_lib")
    if library._threadpool_get_thread_count() != torch.get_num_threads():
        library._unsafe_reset_threadpool(torch.get_num_threads())
    return found
