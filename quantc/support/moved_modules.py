"""Modules that have moved: the old path still imports, with a DeprecationWarning, until 0.3."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ClassVar

PACKAGE = "quantc"
MOVED: dict[str, str] = {
    "annotator": "annotate.annotator",
    "api": "verbs.capture",
    "bench.built": "bench.contender_build",
    "capability": "spec.capability",
    "dialect": "ir.dialect",
    "dump": "text.printer",
    "engines": "targets.engines",
    "engines.module": "targets.engines.engine_module",
    "example": "cli.example",
    "executorch": "targets.executorch",
    "executorch.artifact": "targets.executorch.artifact",
    "flows.constructors": "nn.constructors",
    "flows.eager.ledger": "flows.eager.layer_runs",
    "flows.eager.observing": "flows.eager.attach_observers",
    "flows.eager.stubs": "nn.stubs",
    "flows.foreign": "flows.foreign_observers",
    "flows.histogram_observer": "nn.histogram_observer",
    "flows.pt2e.observing": "flows.pt2e.group_observers",
    "flows.range_observers": "nn.range_observers",
    "formats": "spec.formats",
    "instruction_sets": "spec.instruction_sets",
    "kernels": "targets.kernels",
    "kernels.agreement": "targets.kernels.kernel_agreement",
    "kernels.lowered": "targets.kernels.lowered",
    "kernels.packed": "targets.kernels.kernel",
    "kernels.stored": "verbs.load",
    "kernels.table": "targets.kernels.kernel_table",
    "nn._intrinsic": "nn.intrinsic",
    "nn.byte_ops": "nn.functional_ops",
    "nn.in_float": "nn.float_fallback",
    "nn.on_kernels": "nn.kernel_ops",
    "nn.run_time": "nn.dynamic_module",
    "nn.trained": "nn.qat_module",
    "nn.weighted": "nn.weighted_module",
    "numerics": "spec.numerics",
    "observe.average": "observe.moving_average",
    "observe.fixed": "observe.fixed_qparams",
    "onnx": "targets.onnx",
    "onnx.module": "targets.onnx.onnx_module",
    "outcomes": "ir.decisions",
    "parse": "text.parser",
    "places": "ir.site_index",
    "plan": "ir.plan",
    "program": "ir.program",
    "qat.plot": "qat.training_chart",
    "quantizer": "annotate.quantizer",
    "registry": "pipeline.registry",
    "selectors": "config.selectors",
    "signature": "ir.signature",
    "sites": "ir.sites",
    "types": "ir.types",
}
"""Old path of each documented module, or module that pickles name, to its new path."""


class MovedModules(MetaPathFinder):
    """Import finder for old paths, including the modules of moved packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, *parts = fullname.split(".")
        if package != PACKAGE:
            return None
        for count in range(len(parts), 0, -1):
            if (old := ".".join(parts[:count])) in MOVED:
                break
        else:
            return None
        place = ".".join((PACKAGE, MOVED[old], *parts[count:]))
        return ModuleSpec(fullname, MovedLoader(place), is_package=True)


class MovedLoader(Loader):
    """Loads the module at its new path."""

    def __init__(self, place: str) -> None:
        self.place = place

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} has moved to {self.place}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self.place)
        self.kept = module.__spec__, module.__loader__, module.__package__, getattr(module, "__path__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the attributes that the import machinery has set to the old path; the module has been executed
        already."""
        module.__spec__, module.__loader__, module.__package__, path = self.kept
        if path is None:
            del module.__path__
        else:
            module.__path__ = path


class Package(ModuleType):
    """The package itself: modules do not replace its functions of the same name (`quantc.parse`, `quantc.capture`)."""

    kept: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in self.kept and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def find_moved(keep: Iterable[str] = ()) -> None:
    """Look up old paths from now on, before others: a moved package would find its modules a second time.

    `keep` has the public names of the package that no module replaces.
    """
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
    Package.kept |= frozenset(keep)
    sys.modules[PACKAGE].__class__ = Package


__all__ = ["MOVED", "find_moved"]
