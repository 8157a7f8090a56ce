"""The faults of an eager model, by name.

The flow's verbs check for faults before they change anything, and raise the first kind found, with every location of it.
An intended fault is accepted by name, `convert(model, accept="reused-layer")`, and then only warned about.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quantc.errors import ConfigError, MixedTensorsError, RefusedError, suggest


class EagerError(RefusedError):
    """A model that the eager flow cannot quantize. `faults` holds every location, not only the first."""

    faults: tuple[Fault, ...] = ()


class EagerWarning(UserWarning):
    """A model that can be quantized, but hardly as it was meant."""


class ReusedLayerError(EagerError):
    """One layer is run at several places, and would have one output scale for all of them."""


class MissingStubError(EagerError, MixedTensorsError):
    """A quantized layer reads a float tensor, or a float one a quantized tensor."""


class NotObservedError(EagerError):
    """A layer that is to be quantized has seen no data."""


class EagerModeError(EagerError):
    """The model, or a part of it, is in training mode where it should not be, or the other way round."""


class NoEffectError(EagerError):
    """A qconfig that changes nothing: its key matches no module, or there is nothing to quantize below it."""


class NoStaticFormError(EagerError):
    """A layer that can be quantized only with scales found as it runs has a qconfig for scales found before."""


class NothingQuantizedError(EagerError):
    """No layer would be, or was, quantized."""


class SwapError(EagerError):
    """A layer of which no quantized module can be made: its qconfig, or what its observer has seen, does not do."""


class AlreadyDoneError(EagerError):
    """The model was prepared or converted before."""


class UnfusedWarning(EagerWarning):
    """Layers that run one after the other and could be one."""


class ClippedWarning(EagerWarning):
    """A converted model that is not what was trained: its values go beyond the range that training clipped them to."""


class LostHookWarning(EagerWarning):
    """Hooks that cannot be kept."""


@dataclass(frozen=True)
class Check:
    """One kind of fault: its name, how it is raised, and what to do about it."""

    name: str
    error: type[EagerError]
    advice: str


REUSED = Check(
    "reused-layer",
    ReusedLayerError,
    "give each place a layer of its own (copy.deepcopy, or a second FloatFunctional)",
)
MISSING_STUB = Check(
    "missing-stub",
    MissingStubError,
    "put a QuantStub where floats come in and a DeQuantStub where they go out, or wrap the part in QuantWrapper",
)
NOT_OBSERVED = Check(
    "no-data",
    NotObservedError,
    "run the prepared model on data that reaches these layers, or set their qconfig to None",
)
MODE = Check("mode", EagerModeError, "call model.eval() first")
NO_EFFECT = Check("no-effect", NoEffectError, "correct the name, or leave the qconfig out")
CHECKS = {check.name: check for check in (REUSED, MISSING_STUB, NOT_OBSERVED, MODE, NO_EFFECT)}


@dataclass(frozen=True)
class Fault:
    """One fault: which check found it, at which module, and what it is."""

    check: Check
    path: str
    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.path or 'the model itself'}: {self.what}"


Accept = str | Iterable[str]
"""Names of faults that are meant."""


def accepted_checks(accept: Accept) -> frozenset[str]:
    """The names of the checks to be warned of only. ConfigError for one that there is not."""
    names = frozenset([accept] if isinstance(accept, str) else accept)
    for name in sorted(names):
        if name not in CHECKS:
            raise ConfigError(
                f"unknown check {name!r} to accept",
                where=f"accept={name!r}",
                advice=suggest(str(name), CHECKS, noun="checks"),
            )
    return names


def settle(faults: Iterable[Fault], accept: Accept = ()) -> None:
    """Raise the faults found, all of the first kind together; warn of accepted ones."""
    meant = accepted_checks(accept)
    by_check: dict[Check, list[Fault]] = {}
    for fault in faults:
        by_check.setdefault(fault.check, []).append(fault)
    for check, found in by_check.items():
        if check.name not in meant:
            raise as_error(found)
    for check, found in by_check.items():
        warnings.warn(f"{check.name}, accepted: {_list_places(found)}", EagerWarning, stacklevel=3)


def as_error(found: Sequence[Fault], can_accept: bool = True) -> EagerError:
    """The error for faults of one kind."""
    check, first = found[0].check, found[0]
    what = first.what if len({fault.what for fault in found}) == 1 else _list_places(found)
    where = ", ".join(fault.path or "the model itself" for fault in found)
    meant = f"; if it is meant, accept={check.name!r}" if can_accept else ""
    error = check.error(what, where=where, advice=f"{first.advice or check.advice}{meant}")
    error.faults = tuple(found)
    return error


def _list_places(found: Sequence[Fault]) -> str:
    return "; ".join(str(fault) for fault in found)
