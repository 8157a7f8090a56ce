"""Numeric problems of a quantized program, in a few sentences for the top of reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

from quantc.config.selectors import AnySelector, ByEdge, ByModule, ByNode
from quantc.inspect.comparison import Comparison, Layer, Vanished
from quantc.support.sqnr import format_sqnr

MODEL_DB = 20.0
"""The SQNR below which a whole model is likely to give other answers: a tenth of the signal's amplitude is noise."""
OP_DB = 10.0
"""The same for one op that alone is quantized."""
VANISHED = 0.5
"""Share of a tensor's values below half a step, thus rounded to zero, above which it is a finding."""
MAX_NAMED = 3
"""Maximum number of ops and tensors named; the tables have all."""


def findings(comparison: Comparison, measured_on: str) -> tuple[str, ...]:
    """Results below what can be expected of a quantized program, worst first."""
    return tuple(_findings(comparison, measured_on))


def _findings(comparison: Comparison, measured_on: str) -> Iterator[str]:
    low = [layer for layer in comparison.worst() if layer.local is not None and _is_below(layer.local, OP_DB)]
    if _is_bad(comparison):
        costly = [layer for layer in comparison.costliest(MAX_NAMED) if layer.local != math.inf]
        blame = "" if low or not costly else f" The ops that cost the most: {_name_worst(costly)}."
        yield (
            f"the quantized model is at {_decibels(comparison.sqnr)} over {measured_on}, below {MODEL_DB:.0f} dB: "
            f"expect other answers than those of the float model.{blame}"
        )
    if low:
        yield f"{_count_text(low, 'op')} below {OP_DB:.0f} dB alone, over {measured_on}: {_name_worst(low)}"
    gone = [each for each in comparison.vanished if each.share > VANISHED]
    if gone:
        worst = sorted(gone, key=lambda each: -each.share)
        yield (
            f"{_count_text(gone, 'tensor')} mostly below half a step, and so mostly zero, over {measured_on}: {_name_worst(worst)}"
        )


def _is_bad(comparison: Comparison) -> bool:
    """NaN says that there are no floats to compare, unless a difference is NaN itself."""
    if math.isnan(comparison.sqnr):
        return any(math.isnan(difference) for difference in comparison.largest)
    return comparison.sqnr < MODEL_DB


def _is_below(sqnr: float, bound: float) -> bool:
    return math.isnan(sqnr) or sqnr < bound


def _decibels(sqnr: float) -> str:
    return f"{format_sqnr(sqnr)} dB" if math.isfinite(sqnr) else format_sqnr(sqnr)


def _count_text(found: Sequence[object], noun: str) -> str:
    return f"1 {noun} is" if len(found) == 1 else f"{len(found)} {noun}s are"


def _name_worst(found: Sequence[Layer | Vanished]) -> str:
    """The worst of them, each with the line of a config that leaves it float; the first in TOML as well."""
    told = [f"{_where(each)}, {_cost(each)}: {config_line(_selectors(each))}" for each in found[:MAX_NAMED]]
    told[0] += f", in TOML {toml_line(_selectors(found[0]))}"
    more = [f"and {len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
    return "; ".join([*told, *more])


def _where(each: Layer | Vanished) -> str:
    return f"{each.module} ({each.node})" if each.module else each.node


def _cost(each: Layer | Vanished) -> str:
    if isinstance(each, Vanished):
        return f"{each.share:.0%} of its numbers"
    alone = [] if each.local is None else [_decibels(each.local)]
    return ", ".join([*alone, *([] if each.gain is None else [f"costs {each.gain:.1f} dB"])])


def _selectors(each: Layer | Vanished) -> list[AnySelector]:
    """Config selectors that leave an op float, or a tensor for its users."""
    if each.readers:
        return [ByEdge(producer=each.node, consumer=reader) for reader in each.readers]
    return [ByModule(path=each.module) if each.module else ByNode(node=each.node)]


def config_line(selectors: Sequence[AnySelector]) -> str:
    """Python expression of a config that leaves the selection float."""
    return "QuantConfig()" + "".join(f".{_call(select)}" for select in selectors)


def _call(select: AnySelector) -> str:
    match select:
        case ByEdge():
            return f'set_edge("{select.producer}", "{select.consumer}", FLOAT)'
        case ByNode():
            return f'set_node("{select.node}", FLOAT)'
        case ByModule():
            return f'set("{select.path}", FLOAT)'
        case _:
            raise TypeError(f"no line for {select}")


def toml_line(selectors: Sequence[AnySelector]) -> str:
    """The same rules for a config file, in TOML."""
    rows = []
    for select in selectors:
        given = ", ".join(
            f"{name} = {json.dumps(value)}" for name, value in select.model_dump(exclude_none=True).items()
        )
        rows.append(f'{{ select = {{ {given} }}, use = "FLOAT" }}')
    return f"rules = [{', '.join(rows)}]"
