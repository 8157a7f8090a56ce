"""quantc's own kernels in tests: each set of instructions that the machine has, or none."""

from __future__ import annotations

import pytest

from quantc.targets.kernels.native_library import FLAGS, NoNativeError, compiler, instructions


def _has_compiler() -> bool:
    try:
        return bool(compiler() and instructions(""))
    except NoNativeError:
        return False


def sets_here() -> list[str]:
    """The instructions of this processor that the kernels are compiled for."""
    best = instructions("")
    return list(FLAGS)[: list(FLAGS).index(best) + 1] if best else []


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="there is no compiler, or no AVX2")
