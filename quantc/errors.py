"""One small tree of errors.

Each says what went wrong, where, and what to do about it, in that order. Code raises these and never a bare
assert: a user who meets one should not need to read quantc's source to go on.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class QuantcError(Exception):
    """The root of every error quantc raises on purpose."""

    def __init__(self, what: str, *, where: str | None = None, advice: str | None = None) -> None:
        self.what = what
        self.where = where
        self.advice = advice
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.advice:
            lines.append(f"  what to do: {self.advice}")
        return "\n".join(lines)


class CaptureError(QuantcError):
    """The model could not be turned into a Program."""


class InputError(QuantcError):
    """A Program was called with inputs other than those it was captured for."""


class ModeError(QuantcError):
    """`.train()` or `.eval()` was asked of a Program that can no longer do it."""


class VerifyError(QuantcError):
    """A Program broke a rule of the IR. `faults` holds every fault found, not only the first."""

    def __init__(
        self, what: str, faults: Sequence[str], *, where: str | None = None, advice: str | None = None
    ) -> None:
        super().__init__(what, where=where, advice=advice)
        self.faults = tuple(faults)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  - {fault}" for fault in self.faults)])


class ParseError(QuantcError):
    """Text (a dump, a pipeline) that does not read. `line` and `column` count from 1."""

    def __init__(
        self,
        what: str,
        *,
        text: str = "",
        line: int = 1,
        column: int = 1,
        where: str | None = None,
        advice: str | None = None,
    ) -> None:
        self.line = line
        self.column = column
        rows = text.splitlines()
        place = where or f"line {line}, column {column}"
        if 0 < line <= len(rows):
            place = f"{place}\n    {rows[line - 1]}\n    {' ' * (column - 1)}^"
        super().__init__(what, where=place, advice=advice)


class LoadError(QuantcError):
    """A file that is damaged, of another kind, or not safe to read."""


class SaveError(QuantcError):
    """A Program that holds something a file cannot, or a file that cannot be written."""


class RefusedError(QuantcError):
    """The model, the data or the settings do not allow what is asked. Raised by a pass it comes out as it is: the
    pass did its work."""


class SpecError(RefusedError):
    """A spec, outcome or observation choice that is not well formed; names the field and what is allowed."""


class ConfigError(RefusedError):
    """A config that does not fit the program: a selector that matches nothing, or a file that does not read."""


class DataError(RefusedError):
    """Numbers that cannot be quantized: NaN, infinity, a range too wide, a shape that does not fit the spec."""


class ObservationError(RefusedError):
    """Statistics that cannot give what is asked of them: nothing was seen, or they cannot be merged."""


class AnnotationError(RefusedError):
    """Decisions about tensors that contradict each other, go in a circle, or ask of a backend what it cannot do."""


class CalibrationError(RefusedError):
    """Calibration that cannot go on, or that has not taken place."""


class TrainingError(RefusedError):
    """Training that cannot go on, that has not taken place, or that led to nothing that can be quantized."""


class MixedTensorsError(RefusedError, RuntimeError):
    """A float tensor met a quantized module, or a quantized tensor an op of floats: a stub is missing between them."""


class PatternError(QuantcError):
    """A pattern, rule or rule table that is not well formed."""


class PipelineError(QuantcError):
    """A pipeline that cannot be built: unknown pass or option, or passes in the wrong order."""


class PassError(QuantcError):
    """A pass that raised or broke the graph; names it and the passes that ran before it."""


class GuardError(PassError):
    """A pass that changed the numbers."""


class PluginError(QuantcError):
    """A pass, pipeline, backend or target that is offered twice, does not import, or is not what it is offered as."""


class ConformanceError(QuantcError):
    """A backend that does not do what its table says. `failures` holds every check that failed."""

    def __init__(
        self, what: str, failures: Sequence[str], *, where: str | None = None, advice: str | None = None
    ) -> None:
        super().__init__(what, where=where, advice=advice)
        self.failures = tuple(failures)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  - {failure}" for failure in self.failures)])


class InvariantError(RefusedError):
    """A converted program that breaks an invariant of its target; names the sites."""


class UnknownNameError(QuantcError, LookupError):
    """An unknown name: of a pass, backend, node or op."""


class MissingDependencyError(QuantcError, ImportError):
    """An optional package is needed; the advice names the extra to install."""


def suggest(name: str, known: Iterable[str], *, noun: str = "names") -> str:
    """Advice for an unknown name: the closest known ones, then all of them."""
    options = sorted(known)
    folded = {option.casefold(): option for option in reversed(options)}
    close = [folded[found] for found in get_close_matches(name.casefold(), folded, n=3, cutoff=0.5)]
    listed = ", ".join(options) if options else "none"
    if not close:
        return f"known {noun}: {listed}"
    return f"did you mean {' or '.join(close)}? Known {noun}: {listed}"
