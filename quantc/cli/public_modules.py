"""The public modules: their names are held to the version policy. `make docs` writes docs/public-modules.md from them."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

PUBLIC_MODULES = (
    "quantc",
    "quantc.annotate.annotator",
    "quantc.backends.x86",
    "quantc.bench.contender_build",
    "quantc.bench.contenders",
    "quantc.bench.floor",
    "quantc.bench.measure",
    "quantc.bench.models",
    "quantc.cli.example",
    "quantc.config",
    "quantc.errors",
    "quantc.flows",
    "quantc.flows.eager",
    "quantc.flows.executorch",
    "quantc.flows.fx",
    "quantc.flows.observers",
    "quantc.flows.pt2e",
    "quantc.flows.pt2e.qnnpack_quantizer",
    "quantc.flows.qconfig",
    "quantc.flows.tracing",
    "quantc.hooks",
    "quantc.integer.grid",
    "quantc.ir.decisions",
    "quantc.ir.dialect",
    "quantc.ir.program",
    "quantc.ir.signature",
    "quantc.ir.site_index",
    "quantc.ir.types",
    "quantc.nn",
    "quantc.nn.intrinsic",
    "quantc.nn.quantized",
    "quantc.nn.quantized.modules.conv",
    "quantc.observe",
    "quantc.observe.output_error",
    "quantc.passes.insert_observers",
    "quantc.patterns",
    "quantc.patterns.fusions",
    "quantc.pipeline",
    "quantc.pipeline.registry",
    "quantc.pipelines",
    "quantc.qat",
    "quantc.qat.training_chart",
    "quantc.qdq.ops",
    "quantc.reference",
    "quantc.rewrite.partition",
    "quantc.spec",
    "quantc.spec.arithmetic",
    "quantc.spec.capability",
    "quantc.spec.formats",
    "quantc.spec.granularity",
    "quantc.spec.instruction_sets",
    "quantc.spec.numerics",
    "quantc.spec.observation",
    "quantc.spec.spec",
    "quantc.targets.kernels.kernel",
    "quantc.targets.kernels.kernel_agreement",
    "quantc.targets.kernels.kernel_table",
    "quantc.targets.kernels.lowered",
    "quantc.targets.target",
    "quantc.targets.target_table",
    "quantc.testing",
    "quantc.text.digests",
    "quantc.text.parser",
    "quantc.text.printer",
    "quantc.verbs.capture",
)
"""Modules that documents and examples import from; everything else is internal."""

INTRO = """\
# Public modules

Made by `make docs` from the modules' own docstrings; change it there. The [policy](policy.md) holds for names that these
modules define without a leading underscore; for those that have an `__all__`, it is the list. Other modules are internal
and change without notice.
"""


def summary(module: str) -> str:
    """The first line of a module's docstring, read without importing the module."""
    found = find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(module)
    told = ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or ""
    return told.partition("\n")[0].replace("|", r"\|")


def public_modules_page() -> str:
    """docs/public-modules.md."""
    import quantc

    rows = [f"| `{module}` | {summary(module)} |" for module in PUBLIC_MODULES]
    names = [f"`{name}`" for name in quantc.__all__]
    parts = [INTRO, "| module | what it is |", "|---|---|", *rows, "", "## Names of `quantc`", "", ", ".join(names)]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(public_modules_page())
