"""Which node a pass was at when it raised."""

from __future__ import annotations

from torch import fx


def node_at_fault(error: BaseException) -> fx.Node | None:
    """The node held by the variable `node` of the innermost function that has one.

    A pass walks the graph with a variable of that name (as all of quantc does), so an exception that says nothing
    of nodes, such as an IndexError, can still be traced to one.
    """
    found: fx.Node | None = None
    trace = error.__traceback__
    while trace is not None:
        candidate = trace.tb_frame.f_locals.get("node")
        if isinstance(candidate, fx.Node):
            found = candidate
        trace = trace.tb_next
    return found
