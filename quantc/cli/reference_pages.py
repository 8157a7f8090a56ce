"""Generator of the reference pages of passes and backends, from the code itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo

from quantc.annotate.quantizer import Backend
from quantc.backends.rules import NOT_INTEGER
from quantc.backends.support_claims import WITHOUT_DELEGATE, WITHOUT_KERNEL
from quantc.errors import QuantcError
from quantc.pipeline.pipeline import Pass
from quantc.pipeline.registry import BACKENDS, PASSES, PIPELINES, Factory
from quantc.spec.capability import Capability
from quantc.spec.formats import Offer
from quantc.spec.instruction_sets import instruction_set
from quantc.support.option_text import spell

INTRO = """\
# Passes

Made by `quantc passes --markdown` from the passes' own docstrings; change it there. How to write one:
[write-a-pass.md](write-a-pass.md).

A pass *needs* a stage the program must have reached, may *give* one, and may have to run *before* one. What it
promises about the numbers is what the `Guard` hook checks.
"""

BACKENDS_INTRO = """\
# Backends

Made by `quantc backends --markdown` from the backends' tables; change them there. How to write one:
[write-a-backend.md](write-a-backend.md).

A *role* says what becomes of the tensors a rule names: a spec, or a scale and zero point that are known beforehand.
`like x` is the scale of `x`. `pass` is whatever `x` comes as: such a rule takes part where it comes quantized, and a
role with a question mark is quantized only if everybody who reads the tensor wants it so. Operands without a role stay
float, biases among them. A config may ask for any spec the backend *takes*.

A *mode* is what `qc.quantize(..., mode=...)` and `quantc quantize --mode` ask of everything before a config has its say
([dynamic-and-weight-only.md](dynamic-and-weight-only.md)). A rule that is *static* has scales that are known beforehand; one
that is *dynamic* can find those of what it reads as the program runs: `yes` wherever that is asked for, `named` only where
the config names the op, the node or the edge, or, for an op with a weight, the layer. Weight-only serves every rule that has a weight.

A rule *supports* the forms it can be carried out in: `qdq` (quantize and dequantize ops around float ones), `integer`
(the reference in integer arithmetic), `kernel` (whatever a mode asks of it, `qc.lower` runs on kernels of the backend's own
name, within a step of the integer form, with nothing but bytes between two quantized ops), `delegate` (whatever a mode
asks of it, ExecuTorch's delegate computes it on integers, within a step of the Q/DQ form: [executorch.md](executorch.md)),
`onnx` (written as ONNX and run by ONNX Runtime, it is within a step of the Q/DQ form). What runs each op of a model is in
`lowered.placed`, with the reason where no kernel does, and for ExecuTorch in `lowered.delegation()`.
"""
STATIC = "static"
LEVELS = ("qdq", "integer", "kernel", "delegate", "onnx")


@dataclass(frozen=True, slots=True)
class PageRow:
    """One line of `quantc passes`. `error` says why a plugin cannot be used; the rest is then unknown."""

    name: str
    provider: str
    summary: str = ""
    options: tuple[str, ...] = ()
    needs: str = ""
    gives: str = ""
    error: str = ""


def pass_rows() -> list[PageRow]:
    """Every known pass, including those that cannot be imported."""
    return [_row(name, PASSES.provider(name), _pass_row) for name in PASSES]


def pipeline_rows() -> list[PageRow]:
    """Every known named pipeline."""
    return [_row(name, PIPELINES.provider(name), _pipeline_row) for name in PIPELINES]


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One line of `quantc backends`. `rules` is 0 for a quantizer without a table; `error` as in `PageRow`."""

    name: str
    provider: str
    rules: int = 0
    summary: str = ""
    modes: dict[str, str] = field(default_factory=dict)
    """The spec of each mode of `qc.quantize`, as text; empty for static, which takes the backend's roles."""
    named: tuple[str, ...] = ()
    """The rules that are carried out with scales from data only where a config names the op."""
    dynamic: dict[str, str] = field(default_factory=dict)
    """The rules that can find scales as the program runs: "yes", or "named" if a config must name the op."""
    error: str = ""

    @property
    def told(self) -> str:
        """Summary, or the reason why it cannot be used."""
        return self.error or self.summary


def backend_rows() -> list[BackendRow]:
    """Every known backend, including those that cannot be imported."""
    return [_backend_row(name) for name in BACKENDS]


def _backend_row(name: str) -> BackendRow:
    provider = BACKENDS.provider(name)
    try:
        backend = BACKENDS[name]
    except QuantcError as error:
        return BackendRow(name, provider, error=error.what)
    rules = getattr(backend, "table", ())
    return BackendRow(
        name,
        provider,
        len(rules),
        getattr(backend, "summary", ""),
        {STATIC: "", **{mode: str(spec) for mode, spec in getattr(backend, "modes", {}).items()}},
        tuple(rule.name for rule in rules if rule.static is Offer.NAMED),
        {rule.name: rule.dynamic.value for rule in rules if rule.dynamic is not Offer.NO},
    )


def passes_page(provider: str = "quantc") -> str:
    """docs/passes.md: passes and pipelines of one distribution."""
    passes = [kind for _, kind in PASSES.provided_by(provider)]
    pipelines = list(PIPELINES.provided_by(provider))
    parts = [INTRO, *("\n".join(_pass_section(kind)) for kind in passes), "# Named pipelines\n"]
    parts += ["\n".join(_pipeline_section(name, make)) for name, make in pipelines]
    return "\n".join(parts)


def backends_page(provider: str = "quantc") -> str:
    """docs/backends.md: backends of one distribution, with their roles, specs and rules."""
    found = [backend for _, backend in BACKENDS.provided_by(provider)]
    tables = [backend for backend in found if isinstance(backend, Backend)]
    return "\n".join([BACKENDS_INTRO, *("\n".join(_backend_section(backend)) for backend in tables)])


def _backend_section(backend: Backend) -> Iterator[str]:
    yield f"## {backend.name}\n"
    yield f"{backend.summary}\n"
    if backend.instruction_set:
        yield f"Its numbers are for {instruction_set(backend.instruction_set)} ([overflow.md](overflow.md)).\n"
    if backend.before:
        yield f"Before annotating: `{','.join(map(str, backend.before))}`.\n"
    yield from table(("role", "what it is"), [(f"`{name}`", str(backend.outcome(name))) for name in backend.roles])
    yield from table(
        ("takes", "dtype", "scheme", "granularity", "when", "range", "smallest scale"),
        [_capability_cells(capability) for capability in backend.capabilities],
    )
    if backend.modes:
        asked = [(mode, f"`{spec}`") for mode, spec in backend.modes.items()]
        yield from table(("mode", "what it asks of everything"), [(STATIC, "the roles above"), *asked])
    rows = [
        (
            f"`{rule.name}`",
            f"`{rule.pattern}`",
            ", ".join(f"{name}: {role}" for name, role in rule.roles.items()),
            *("" if offer is Offer.NO else offer.value for offer in (rule.static, rule.dynamic)),
            *("yes" if level in rule.supports else "" for level in LEVELS),
        )
        for rule in backend.table
    ]
    yield from table(("rule", "pattern", "roles", "static", "dynamic", *LEVELS), rows)
    yield from _without_integers(backend)
    yield from _without_kernels(backend)
    yield from _without_delegate(backend)


def _without_integers(backend: Backend) -> Iterator[str]:
    """Rules without an integer form, and why."""
    names = [rule.name for rule in backend.table if "integer" not in rule.supports]
    yield from _with_reasons("Without an integer form", names, NOT_INTEGER)


def _without_kernels(backend: Backend) -> Iterator[str]:
    """Rules that do not run on kernels, and why; empty for a backend without kernels."""
    names = [rule.name for rule in backend.table if "kernel" not in rule.supports]
    yield from _with_reasons("Not on kernels", names, WITHOUT_KERNEL.get(backend.name, {}))


def _without_delegate(backend: Backend) -> Iterator[str]:
    """Rules that a delegate does not take, and why; empty for a backend without a delegate."""
    if any("delegate" in rule.supports for rule in backend.table):
        names = [rule.name for rule in backend.table if "delegate" not in rule.supports]
        yield from _with_reasons("Not in the delegate", names, WITHOUT_DELEGATE)


def _with_reasons(title: str, names: Iterable[str], reasons: Mapping[str, str]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for name in names:
        if name in reasons:
            by_reason.setdefault(reasons[name], []).append(f"`{name}`")
    if by_reason:
        yield f"{title}:\n"
        yield from (f"- {', '.join(rules)}: {reason}." for reason, rules in by_reason.items())
        yield ""


def _capability_cells(capability: Capability) -> tuple[str, ...]:
    low = capability.qmin if capability.qmin is not None else min(dtype.qmin for dtype in capability.dtypes)
    high = capability.qmax if capability.qmax is not None else max(dtype.qmax for dtype in capability.dtypes)
    return (
        capability.role.value,
        " or ".join(dtype.value for dtype in capability.dtypes),
        " or ".join(scheme.value for scheme in capability.schemes),
        " or ".join(capability.granularities),
        " or ".join(timing.value for timing in capability.timings),
        f"{low}..{high}",
        f"{capability.min_eps!r}" if capability.min_eps else "any",
    )


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Lines of a Markdown table, and an empty one."""
    yield _cells(head)
    yield f"|{'---|' * len(head)}"
    yield from (_cells(row) for row in rows)
    yield ""


def _cells(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def _row(name: str, provider: str, build: Callable[[str], PageRow]) -> PageRow:
    try:
        return build(name)
    except QuantcError as error:
        return PageRow(name, provider, error=error.what)


def _pass_row(name: str) -> PageRow:
    kind = PASSES[name]
    gives = kind.gives.label if kind.gives is not None else ""
    return PageRow(name, PASSES.provider(name), kind.summary(), kind.options(), kind.needs.label, gives)


def _pipeline_row(name: str) -> PageRow:
    factory = PIPELINES[name]
    options = tuple(option.replace("_", "-") for option in inspect.signature(factory).parameters)
    return PageRow(name, PIPELINES.provider(name), _doc(factory).partition("\n")[0], options)


def _pass_section(kind: type[Pass]) -> Iterator[str]:
    facts = [f"needs {kind.needs.label}"]
    facts += [f"gives {kind.gives.label}"] if kind.gives is not None else []
    facts += [f"before {kind.before.label}"] if kind.before is not None else []
    facts.append(f"numbers: {kind.preserves.value}")
    yield f"## {kind.name}\n"
    yield f"{_doc(kind)}\n"
    yield f"*{' · '.join(facts)}*\n"
    if kind.model_fields:
        yield "| option | type | default | |"
        yield "|---|---|---|---|"
        yield from (_option_line(name, field) for name, field in kind.model_fields.items())
        yield ""


def _option_line(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{_default(field.get_default(call_default_factory=True))}`"
    cells = (f"`{name.replace('_', '-')}`", f"`{_type(field.annotation)}`", default, field.description or "")
    return _cells(cells)


def _pipeline_section(name: str, factory: Factory) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"{_doc(factory)}\n"
    required = [item for item in inspect.signature(factory).parameters.values() if item.default is item.empty]
    if not required:
        yield f"`{factory()}`\n"


def _doc(thing: object) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def _type(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _default(value: Any) -> str:
    try:
        return spell(value)
    except TypeError:
        return str(value)
