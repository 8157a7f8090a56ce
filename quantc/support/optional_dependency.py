"""Optional dependencies: imported on demand, with an error that names the extra to install if they are missing."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from shlex import quote
from typing import Any

from quantc.errors import MissingDependencyError


def extra(module: str, name: str, purpose: str) -> Any:
    """Import a module of an optional package. `name` is the extra of quantc that installs it."""
    return installed(module, f"quantc[{name}]", purpose)


def installed(module: str, requirement: str, purpose: str) -> Any:
    """Import a module of an optional package. `requirement` is what pip installs it by."""
    try:
        return import_module(module)
    except (ImportError, KeyError) as error:  # KeyError: a package whose own import failed before
        missing = (getattr(error, "name", None) or module).partition(".")[0]  # the module, or one of its dependencies
        raise MissingDependencyError(
            f"{missing} is not installed", where=purpose, advice=f"pip install {quote(requirement)}"
        ) from error


def is_installed(*packages: str) -> bool:
    """True if all of these modules can be imported. Imports nothing."""
    return all(find_spec(name) is not None for name in packages)
