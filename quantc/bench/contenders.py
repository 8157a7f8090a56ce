"""Contenders: quantc's own ways to run a model, and those of other tools.

A contender is a name, a one-line description, the packages it needs, and a build function. Each is built as its own
documentation says, for one thread. One that cannot be built raises, and becomes a row with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.bench import engines, mobile
from quantc.bench.contender_build import Built
from quantc.bench.models import Task
from quantc.bench.race import EAGER
from quantc.errors import MissingDependencyError, QuantcError, UnknownNameError, suggest
from quantc.inspect.size import size_of
from quantc.ir.program import Program
from quantc.targets.kernels.packing import engine
from quantc.targets.kernels.saturation import adds_in_16_bits

TARGET = "x86"


@dataclass(frozen=True)
class Contender:
    """A way to run a model."""

    told: str
    build: Callable[[Task], Built]
    needs: tuple[str, ...] = ()
    """The packages that have to be installed."""

    def missing(self) -> tuple[str, ...]:
        """Required packages that are not installed."""
        return tuple(name for name in self.needs if find_spec(name) is None)

    def make(self, task: Task) -> Built:
        """Build it, or raise with the reason."""
        if missing := self.missing():
            verb = "is" if len(missing) == 1 else "are"
            raise MissingDependencyError(
                f"{', '.join(missing)} {verb} not installed", advice="pip install 'quantc[bench]'"
            )
        return self.build(task)


def chosen(names: list[str] | None) -> dict[str, Contender]:
    """Contenders by name, all if none is named; the float model is always included, and first."""
    for name in names or ():
        if name not in CONTENDERS:
            raise UnknownNameError(
                f"unknown contender {name!r}",
                where="--contender",
                advice=suggest(name, CONTENDERS, noun="contenders"),
            )
    return {name: each for name, each in CONTENDERS.items() if not names or name in (EAGER, *names)}


# -- float -----------------------------------------------------------------------------------------------------


def eager(task: Task) -> Built:
    return Built(task.model, weights_of(task.model))


def compiled(task: Task) -> Built:
    return Built(_compile(task.model, task), weights_of(task.model))


def _compile(model: nn.Module, task: Task) -> Callable[..., Any]:
    """A module compiled by inductor for inference."""
    made: Callable[..., Any] = torch.compile(model)
    made(*task.calibration[0])
    return made


@contextmanager
def constants_frozen() -> Iterator[None]:
    """Context manager that makes inductor freeze constants, without which it uses no int8 kernels. It must be active
    during calls of compiled code, not only during compilation: other tools' exporters drop compiled code, and it is
    compiled again.
    """
    from torch._inductor import config

    with config.patch(freezing=True):
        yield


def weights_of(module: nn.Module) -> int:
    """Bytes of a module's weights; tied ones count once. torch.ao's packed objects count as saved."""
    leaves = pytree.tree_leaves(module.state_dict())
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    distinct = {(leaf.data_ptr(), leaf.numel()): leaf.numel() * leaf.element_size() for leaf in tensors}
    return sum(distinct.values()) + sum(_saved_size(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject))


def _saved_size(packed: torch.ScriptObject) -> int:
    file = BytesIO()
    torch.save(packed, file)
    return file.getbuffer().nbytes


# -- quantc ----------------------------------------------------------------------------------------------------


def _capture(task: Task) -> Program:
    return task.program if isinstance(task.program, Program) else qc.capture(task.model, task.calibration[0])


def _convert(task: Task, backend: str = TARGET) -> Program:
    """Quantized for this processor: where it adds no pairs in 16 bits weights have all their bits, as other tools' have
    everywhere."""
    prepared = qc.prepare(_capture(task), backend)
    qc.calibrate(prepared, task.calibration, progress="silent")
    return qc.convert(prepared, reduce_range="auto" if adds_in_16_bits() else "no")


def quantc_static(task: Task) -> Built:
    return Built.of_lowered(qc.lower(_convert(task), TARGET))


def quantc_tuned(task: Task) -> Built:
    return Built.of_lowered(qc.lower(_convert(task), TARGET, tune=True, progress="silent"))


def quantc_compiled(task: Task) -> Built:
    made = qc.lower(_convert(task), TARGET, tune=True, compile=True, progress="silent")
    made(*task.calibration[0])  # compiles
    return Built.of_lowered(made)


def quantc_dynamic(task: Task) -> Built:
    prepared = qc.prepare(_capture(task), TARGET, config=mode_config(quantizer_of(TARGET), "dynamic"))
    return Built.of_lowered(qc.lower(qc.convert(prepared), TARGET))


def on_engine(backend: str, engine: str) -> Callable[[Task], Built]:
    """Builder: quantc, static, for a backend whose rules suit an engine, on that engine."""

    def build(task: Task) -> Built:
        made = qc.lower(_convert(task, backend), TARGET, engine=engine)
        return Built(made, size_of(made.program))

    return build


# -- torch.ao and torchao --------------------------------------------------------------------------------------


def fx_graph_mode(name: str) -> Callable[[Task], Built]:
    """Builder: torch.ao's FX graph mode for one of its engines."""

    def build(task: Task) -> Built:
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        with engine(name):
            mapping = get_default_qconfig_mapping(name)
            prepared = prepare_fx(copy.deepcopy(task.model), mapping, task.calibration[0])
            for batch in task.calibration:
                prepared(*batch)
            made = convert_fx(prepared)
        if not any("quantize_per_tensor" in str(node.target) for node in made.graph.nodes):
            raise QuantcError("FX graph mode quantized nothing: it looks for modules and functions of torch.nn")
        return Built(made, weights_of(made))

    return build


def torch_dynamic(task: Task) -> Built:
    from torch.ao.quantization import quantize_dynamic

    with engine("fbgemm"):
        made = quantize_dynamic(copy.deepcopy(task.model))  # type: ignore[no-untyped-call]
    if not any("quantized.dynamic" in type(part).__module__ for part in made.modules()):
        raise QuantcError("quantize_dynamic quantized nothing: it looks for modules of torch.nn")
    return Built(made, weights_of(made))


def pt2e_inductor(task: Task) -> Built:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    exported = torch.export.export(task.model, task.calibration[0], strict=True).module()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    for batch in task.calibration:
        prepared(*batch)
    made = convert_pt2e(prepared)
    return Built(_compile(made, task), weights_of(made))


CONTENDERS: dict[str, Contender] = {
    EAGER: Contender("the float model as it is", eager),
    "compile": Contender("the float model, torch.compile with constants frozen", compiled),
    "quantc": Contender("quantc, static, x86", quantc_static),
    "quantc-tuned": Contender("quantc, static, x86, kernels chosen by timing them here", quantc_tuned),
    "quantc-compiled": Contender("the same, and what is between kernels compiled", quantc_compiled),
    "quantc-dynamic": Contender("quantc, dynamic, x86", quantc_dynamic),
    "quantc-onnxruntime": Contender(
        "quantc, static, onnx, run by ONNX Runtime", on_engine("onnx", "onnxruntime"), ("onnx", "onnxruntime")
    ),
    "quantc-openvino": Contender(
        "quantc, static, onnx, run by OpenVINO", on_engine("openvino", "openvino"), ("onnx", "openvino")
    ),
    "quantc-auto": Contender("quantc, static, onnx, the fastest engine there is", on_engine("onnx", "auto")),
    "fx-x86": Contender("torch.ao FX graph mode, engine x86", fx_graph_mode("x86")),
    "fx-onednn": Contender("torch.ao FX graph mode, engine onednn", fx_graph_mode("onednn")),
    "fx-fbgemm": Contender("torch.ao FX graph mode, engine fbgemm", fx_graph_mode("fbgemm")),
    "torch-dynamic": Contender("torch.ao quantize_dynamic, engine fbgemm", torch_dynamic),
    "pt2e-inductor": Contender("torchao PT2E, inductor with constants frozen", pt2e_inductor, ("torchao",)),
    "onnxruntime": Contender("ONNX Runtime, static Q/DQ", engines.onnxruntime, ("onnxruntime", "onnx", "onnxscript")),
    "quantc-executorch": Contender("quantc, static, in ExecuTorch", mobile.quantc_static, ("executorch",)),
    "quantc-executorch-dynamic": Contender("quantc, dynamic, in ExecuTorch", mobile.quantc_dynamic, ("executorch",)),
    "executorch": Contender("ExecuTorch, its own quantizer for XNNPACK, static", mobile.xnnpack(), ("executorch",)),
    "executorch-dynamic": Contender(
        "ExecuTorch, its own quantizer for XNNPACK, dynamic", mobile.xnnpack(is_dynamic=True), ("executorch",)
    ),
    "openvino": Contender("NNCF, static, on OpenVINO", engines.openvino, ("openvino", "nncf")),
}
