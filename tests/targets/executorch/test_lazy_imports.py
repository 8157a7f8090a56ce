"""ExecuTorch is imported when it is needed, and without a word of it."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

import quantc as qc
from quantc.errors import MissingDependencyError
from quantc.targets.executorch.lazy_imports import package, quiet, suppress_warnings
from tests.support.executorch_models import conv, image, static


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = static(conv(), image())
    for name in [name for name in sys.modules if name.partition(".")[0] == "executorch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(MissingDependencyError, match="executorch is not installed") as caught:
        qc.lower(quantized, "executorch")
    assert "pip install 'quantc[executorch]'" in str(caught.value)


@pytest.mark.slow
def test_warnings_of_other_packages_are_kept_away() -> None:
    quantized = static(conv(), image())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qc.lower(quantized, "executorch")(image())
    assert [str(row.message) for row in caught] == []


def test_warnings_are_kept_away_and_logging_of_warnings_too(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("of another package")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet():
            warnings.warn("unheard", stacklevel=1)
            logger.warning("unheard")
            logger.error("heard")
        with pytest.raises(UserWarning, match="heard again"):
            warnings.warn("heard again", stacklevel=1)
    logger.warning("heard too")
    assert [record.message for record in caplog.records if record.name == logger.name] == ["heard", "heard too"]


def test_what_was_quieter_before_stays_so() -> None:
    logging.disable(logging.ERROR)
    try:
        with quiet():
            assert logging.root.manager.disable == logging.ERROR
        assert logging.root.manager.disable == logging.ERROR
    finally:
        logging.disable(logging.NOTSET)


def test_logging_is_restored_after_an_error() -> None:
    with pytest.raises(KeyError), quiet():
        raise KeyError
    assert logging.root.manager.disable == logging.NOTSET


def test_logging_is_heard_where_only_warnings_are_kept_away(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), suppress_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("of another package").warning("heard")
    assert "heard" in caplog.text


def test_a_package_is_named_that_is_not_there() -> None:
    with pytest.raises(MissingDependencyError, match=r"quantc\[executorch\]"):
        package("executorch_of_tomorrow")
