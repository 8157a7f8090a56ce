"""Modules that have moved: the old path still imports, with a DeprecationWarning, until 0.3."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "quantc"
MOVED: dict[str, str] = {
    "aliasing": "ir.alias_analysis",
    "annotator": "annotate.annotator",
    "api": "verbs.steps",
    "arrangement": "text.pytree_text",
    "artifact": "targets.provenance",
    "aten_spellings": "rewrite.spellings",
    "batches": "cli.data_source",
    "blame": "pipeline.failure",
    "blocks": "targets.space_to_depth",
    "calibrate": "calibration.loop",
    "calibration_report": "calibration.report",
    "callees": "text.target_names",
    "calls": "text.call_parser",
    "capability": "spec.capability",
    "checkpoint": "calibration.checkpoint",
    "checkup": "cli.verify_file",
    "cli_options": "cli.options",
    "coarse": "calibration.underflow",
    "collector": "support.gc_pause",
    "compare_command": "cli.compare_command",
    "compare_job": "cli.compare",
    "compare_sides": "cli.compare_inputs",
    "constants": "rewrite.constant_order",
    "decomposed": "qdq.registration",
    "delivery": "cli.outputs",
    "deployed": "targets.deployed_module",
    "dialect": "ir.dialect",
    "diff": "text.diff",
    "digests": "text.digests",
    "distribute": "calibration.distributed",
    "dump": "text.printer",
    "engines": "targets.engines",
    "example": "cli.example",
    "executorch": "targets.executorch",
    "extras": "support.optional_dependency",
    "feeding": "ir.batch_inputs",
    "float_formats": "qdq.float_ops",
    "folding": "rewrite.affine_folding",
    "formats": "spec.formats",
    "frozen": "support.validated",
    "functional": "rewrite.functionalize",
    "gap": "pipeline.tolerance",
    "graphs": "text.graph_formats",
    "guard": "pipeline.numeric_guard",
    "identities": "rewrite.no_op_calls",
    "inline": "rewrite.inline_wrappers",
    "inserted": "calibration.graph_observers",
    "instruction_sets": "spec.instruction_sets",
    "integer_page": "cli.integer_page",
    "isolation": "calibration.state_isolation",
    "kernels": "targets.kernels",
    "known_arguments": "targets.argument_cache",
    "layout": "spec.granularity",
    "lifting": "rewrite.lift_constants",
    "lines": "text.node_printer",
    "macs": "ir.mac_count",
    "module_copy": "ir.module_copy",
    "nesting": "ir.subgraphs",
    "noise_inputs": "cli.noise_inputs",
    "normal_form": "rewrite.normal_form",
    "numerics": "spec.numerics",
    "observed": "calibration.observed_tensors",
    "one_call": "verbs.quantize",
    "onnx": "targets.onnx",
    "order": "pipeline.stage_order",
    "outcomes": "ir.decisions",
    "packing": "store.bit_packing",
    "pages": "cli.reference_pages",
    "parse": "text.parser",
    "pipeline_parse": "pipeline.parser",
    "pipeline_text": "support.option_text",
    "places": "ir.site_index",
    "plan": "ir.plan",
    "plan_writer": "qdq.insertion",
    "program": "ir.program",
    "progress": "support.progress",
    "proven": "rewrite.infer_dtype",
    "quantize_job": "cli.quantize",
    "quantizer": "annotate.quantizer",
    "reader": "text.lexer",
    "rebuild": "text.rebuild_modules",
    "refusals": "cli.error_output",
    "registry": "pipeline.registry",
    "report": "inspect.report",
    "report_page": "inspect.report_html",
    "reproducer": "pipeline.reproducer",
    "requests": "annotate.config_requests",
    "resolve": "config.resolve",
    "reuse": "calibration.reuse_statistics",
    "run_time": "qdq.choose_qparams",
    "runner": "calibration.interpreter",
    "scales": "calibration.qparams",
    "schema": "verify.schema_check",
    "selectors": "config.selectors",
    "sharing": "annotate.sharing",
    "signature": "ir.signature",
    "sites": "ir.sites",
    "slots": "annotate.match_operands",
    "source": "cli.model_source",
    "statements": "text.graph_parser",
    "substitution": "rewrite.replacements",
    "summary": "cli.inspect_summary",
    "symbols": "ir.size_expressions",
    "table_annotation": "annotate.table_annotation",
    "tally": "calibration.accumulator",
    "tensor_calls": "rewrite.builder",
    "terminal": "support.terminal",
    "text_files": "text.files",
    "ties": "support.equivalence",
    "toml_text": "support.toml_writer",
    "types": "ir.types",
    "values": "text.literals",
}
"""Where a module or package of quantc was, and where it is."""


class MovedModules(MetaPathFinder):
    """Finds what was imported from an old path, modules inside of moved packages too."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        first, _, inner = rest.partition(".")
        if package != PACKAGE or first not in MOVED:
            return None
        place = ".".join(filter(None, (PACKAGE, MOVED[first], inner)))
        return ModuleSpec(fullname, MovedLoader(place), is_package=True)


class MovedLoader(Loader):
    """Gives the module at its new place."""

    def __init__(self, place: str) -> None:
        self.place = place

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} has moved to {self.place}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self.place)
        self.kept = module.__spec__, module.__loader__, module.__package__, getattr(module, "__path__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already: give it back what the import machinery has set to the old path."""
        module.__spec__, module.__loader__, module.__package__, path = self.kept
        if path is None:
            del module.__path__
        else:
            module.__path__ = path


class Package(ModuleType):
    """The package itself: its functions are not replaced by old modules of the same name (`quantc.calibrate`)."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in MOVED and isinstance(value, ModuleType) and name in self.__dict__):
            super().__setattr__(name, value)


def find_moved() -> None:
    """Look up old paths from now on, before others: a moved package would find its modules a second time."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
    sys.modules[PACKAGE].__class__ = Package


__all__ = ["MOVED", "find_moved"]
