"""Export of a program in Q/DQ form to an ONNX model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from quantc.ir.dialect import argument, is_op
from quantc.ir.program import Program
from quantc.ir.types import TensorType, dtype_of, tensor_type
from quantc.targets.onnx.dtypes import onnx_module, onnx_type
from quantc.targets.onnx.graph_builder import GraphBuilder
from quantc.targets.onnx.op_writers import NoOnnxFormError, OpCall, Translation, entry_for
from quantc.targets.onnx.profiles import Profile
from quantc.targets.onnx.quantized_initializers import initializer_of
from quantc.targets.provenance import Provenance

OPSET, IR_VERSION = 21, 10
"""The first opset with 4-bit types and blocks, and the version of the format that goes with it."""
LARGEST_MESSAGE = 2**31 - 1
"""Size limit of a protobuf file."""
MAX_LISTED = 20


@dataclass(frozen=True, eq=False)
class Exported:
    """An ONNX model, and the mapping of its inputs and outputs to the program's."""

    model: Any
    inputs: tuple[int, ...]
    """The flat inputs of the program that it takes."""
    outputs: tuple[Any, ...]
    """For each flat output of the program: the place of the model's, or a Literal."""


@dataclass(frozen=True)
class Literal:
    """An output that is not a tensor."""

    value: Any


def export(program: Program, profile: Profile) -> Exported:
    """Export a program for a runtime profile. NoOnnxFormError lists every op without an ONNX form."""
    onnx = onnx_module()
    translation = Translation(program, GraphBuilder(), profile)
    taken, inputs = _inputs(program, translation)
    _write_nodes(program, translation)
    places, outputs = _outputs(program, translation)
    graph = onnx.helper.make_graph(
        translation.writer.nodes, program.name, inputs, outputs, translation.writer.initializers
    )
    facts = _facts(program, profile)
    model = onnx.helper.make_model(
        graph,
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="quantc",
        producer_version=facts["quantc.version"],
    )
    onnx.helper.set_model_props(model, facts)
    if model.ByteSize() <= LARGEST_MESSAGE:
        _check(onnx, model, program.name)
    return Exported(model, taken, places)


def _check(onnx: Any, model: Any, name: str) -> None:
    """NoOnnxFormError if the model is not valid."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise NoOnnxFormError(
            f"{name} as ONNX is refused by onnx.checker: {error}",
            where="qc.lower(..., 'onnx')",
            advice="write the op it names otherwise in the model, or run the program by qc.lower(program, 'x86')",
        ) from error


def _facts(program: Program, profile: Profile) -> dict[str, str]:
    """Provenance entries of the model's metadata."""
    origin = asdict(Provenance.of(program))
    found = {"version": origin.pop("quantc"), **origin, "profile": profile.name}
    return {f"quantc.{name}": told for name, told in found.items()}


def _value_info(name: str, kind: TensorType | None) -> Any:
    if kind is None:
        raise NoOnnxFormError(
            f"the type of {name} is unknown", where=name, advice="capture the model with example inputs"
        )
    helper = onnx_module().helper
    return helper.make_tensor_value_info(name, onnx_type(kind.dtype), list(kind.shape))


def _inputs(program: Program, translation: Translation) -> tuple[tuple[int, ...], list[Any]]:
    taken, infos = [], []
    for index, node in enumerate(program.graph.find_nodes(op="placeholder")):
        given = program.signature.inputs[index]
        if given.is_constant:
            continue
        name = translation.writer.name(given.name)
        translation.values[node] = name
        infos.append(_value_info(name, given.type or tensor_type(node)))
        taken.append(index)
    return tuple(taken), infos


def _outputs(program: Program, translation: Translation) -> tuple[tuple[Any, ...], list[Any]]:
    """Each output has a node of its own: one value may be returned twice, or be an input."""
    result = next(node for node in reversed(program.graph.nodes) if node.op == "output").args[0]
    leaves: Sequence[Any] = result if isinstance(result, tuple | list) else (result,)
    places: list[Any] = []
    infos: list[Any] = []
    writer = translation.writer
    writer.scope = "output"
    for leaf in leaves:
        if not isinstance(leaf, fx.Node):
            places.append(Literal(leaf))
            continue
        name = writer.emit("Identity", translation.value(leaf))
        places.append(len(infos))
        infos.append(_value_info(name, tensor_type(leaf)))
    return tuple(places), infos


def _write_nodes(program: Program, translation: Translation) -> None:
    refused: list[str] = []
    parts: set[fx.Node] = set()
    """Nodes without an ONNX form, and their items, which are not reported again."""
    for node in program.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or initializer_of(program, node) is not None:
            continue
        translation.writer.scope = node.name
        try:
            if _leaves_clip(node, translation):
                continue
            translation.values[node] = entry_for(node)(OpCall(translation, node))
        except NoOnnxFormError as error:
            if node.target is not getitem or node.args[0] not in parts:
                refused.append(f"{program.describe(node)}: {error.what}")
            parts.add(node)
            translation.values[node] = node.name  # go on, to find all there are
    if refused:
        more = [f"… and {len(refused) - MAX_LISTED} more"] if len(refused) > MAX_LISTED else []
        raise NoOnnxFormError(
            f"{len(refused)} of the ops of {program.name} have no ONNX form",
            where="\n    ".join([*refused[:MAX_LISTED], *more]),
            advice="write them otherwise in the model, or run the program as it is or by qc.lower(program, 'x86')",
        )


def _leaves_clip(node: fx.Node, translation: Translation) -> bool:
    """Leave a clip to the quantize op that alone reads it: there it is a clip of integers, or none is needed."""
    if (
        translation.profile.clips == "float"
        or not is_op(node, "relu", "clamp")
        or dtype_of(node) is not torch.float32
        or dtype_of(node.args[0]) is not torch.float32
        or len(node.users) != 1
    ):
        return False
    user, source = next(iter(node.users)), node.args[0]
    if str(user.target) != "quantized_decomposed.quantize_per_tensor.default" or not isinstance(source, fx.Node):
        return False
    bounds = (0.0, None) if is_op(node, "relu") else (argument(node, "min"), argument(node, "max"))
    if any(isinstance(bound, fx.Node) for bound in bounds):
        return False
    translation.bounds[node] = bounds
    translation.values[node] = translation.value(source)
    return True
