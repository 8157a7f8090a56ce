"""Formats a pass failure and recovers the node being visited from the traceback."""

from __future__ import annotations

from torch import fx

from quantc.errors import QuantcError, VerifyError

FAULTS = 5
"""Maximum number of verification faults in the message; the error's cause has them all."""


def failure_text(error: Exception) -> str:
    """The message of an exception; for quantc's errors with location and the first verification faults."""
    if not isinstance(error, QuantcError):
        return str(error)
    lines = [error.what]
    if error.where:
        lines.append(f"    at {error.where}")
    faults = error.faults if isinstance(error, VerifyError) else ()
    lines += [f"    - {fault}" for fault in faults[:FAULTS]]
    if len(faults) > FAULTS:
        lines.append(f"    - and {len(faults) - FAULTS} more")
    return "\n".join(lines)


def node_at_fault(error: BaseException) -> fx.Node | None:
    """The node in the variable `node` of the innermost frame that has one.

    A pass walks the graph with a variable of that name (as all of quantc does), so an exception without mention of a
    node, such as an IndexError, can still be attributed to one.
    """
    found: fx.Node | None = None
    trace = error.__traceback__
    while trace is not None:
        candidate = trace.tb_frame.f_locals.get("node")
        if isinstance(candidate, fx.Node):
            found = candidate
        trace = trace.tb_next
    return found
