"""All tests run on one thread: they are small, and several run at once. Hypothesis has two profiles here: the same
examples every time, which is the default, and `--hypothesis-profile=random`. Neither judges how long anything takes:
the machine may be busy."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

ANY_SPEED = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.function_scoped_fixture,  # of fixtures that every example may share, such as a folder
]
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=ANY_SPEED)
settings.register_profile("random", deadline=None, suppress_health_check=ANY_SPEED, print_blob=True)
settings.load_profile("fixed")


def pytest_collection() -> None:
    """Collecting makes millions of objects and no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Twenty thousand tests and every module stay to the end: the garbage collector need not walk them each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _engine() -> Iterator[None]:
    """Which engine torch packs weights for is global: a test that sets it does not set it for those after it."""
    before = torch.backends.quantized.engine
    yield
    torch.backends.quantized.engine = before
