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
    keep_what_lives()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between modules, when the fixtures of the last one are gone."""
    if nextitem is None or nextitem.path != item.path:
        keep_what_lives()


def keep_what_lives() -> None:
    """Take all objects from the garbage collector. Twenty thousand tests, every module and what they cache stay to the
    end: walking them each time took longer than most tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """The engine that torch packs weights for and the number of threads are global: a test that sets them does not set
    them for those after it."""
    engine = torch.backends.quantized.engine
    yield
    torch.backends.quantized.engine = engine
    torch.set_num_threads(1)


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
