"""What `convert_fx` gives: a module on int8 kernels, with the modules in it that users have written themselves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc import pipelines
from quantc.errors import InputError
from quantc.flows.fx.custom_config import ConvertCustomConfig, CustomConfigError, QuantType
from quantc.flows.fx.kept_whole import SHAPES, watch, watch_like
from quantc.flows.fx.observed_module import ObservedGraphModule, Preparation, by_position
from quantc.formats import DType
from quantc.kernels.lowered import Lowered
from quantc.kernels.placing import Choosing
from quantc.numerics import QParams
from quantc.outcomes import Fixed, Quantize
from quantc.places import Places
from quantc.program import Program, attribute
from quantc.sites import Site

Grid = tuple[float, int, torch.dtype]
"""Scale, zero point and quantized dtype."""
QUANTIZED = {DType.UINT8: torch.quint8, DType.INT8: torch.qint8}


class QuantizedGraphModule(Lowered):
    """A quantized model on int8 kernels. It is called like the model, and copied and saved as any lowered program is:
    see `quantc.kernels.lowered.Lowered`."""

    inputs: tuple[int, ...] = ()
    """Which inputs come as quantized tensors."""
    outputs: Mapping[int, Grid] = MappingProxyType({})
    """Which outputs are given as quantized tensors, and on which grid."""
    preserved: tuple[str, ...] = ()

    @classmethod
    def of(cls, program: Program, target: str, inputs: Iterable[int], outputs: Iterable[int]) -> QuantizedGraphModule:
        """Lower a converted program."""
        made = cls(pipelines.lower().run_on_copy(program), target)
        if made.placed and not any(row.kernel for row in made.placed):
            warnings.warn(
                f"{target} has kernels for none of the quantized ops of {program.name}: print(quantized) says why",
                stacklevel=3,
            )
        made.inputs = tuple(inputs)
        made.outputs = {index: grid_of_output(program, index) for index in outputs}
        return made

    def preserve(self, source: nn.Module, names: Iterable[str]) -> None:
        """Take attributes of another module over."""
        self.preserved = tuple(names)
        for name in self.preserved:
            setattr(self, name, getattr(source, name))

    @property
    def graph(self) -> fx.Graph:
        """The graph of what runs, kernels among it."""
        return self.module.graph

    @property
    def code(self) -> str:
        return self.module.code

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            running = self.__dict__.get("_running")
            if running is None:
                raise
            return getattr(running.module, name)  # modules of the user's own, by the names they had

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args, kwargs = by_position(self._program.signature, args, kwargs)
        if not self.inputs and not self.outputs:
            return super().forward(*args, **kwargs)
        args = tuple(_as_float(x, index) if index in self.inputs else x for index, x in enumerate(args))
        made = super().forward(*args, **kwargs)
        if not self.outputs:
            return made
        leaves, spec = pytree.tree_flatten(made)
        leaves = [self._on_grid(x, index) for index, x in enumerate(leaves)]
        return pytree.tree_unflatten(leaves, spec)

    def _on_grid(self, x: Any, index: int) -> Any:
        return torch.quantize_per_tensor(x, *self.outputs[index]) if index in self.outputs else x

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedGraphModule:
        choosing = Choosing(allow_float=self.choosing.allow_float, saved=self.choices)
        made = QuantizedGraphModule(self.program.clone(), self.target, choosing, self.is_compiled)
        memo[id(self)] = made
        watch_like(self, made)
        made.inputs, made.outputs, made.preserved = self.inputs, dict(self.outputs), self.preserved
        for name in self.preserved:
            setattr(made, name, copy.deepcopy(getattr(self, name), memo))
        return made


def _as_float(x: Any, index: int) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_quantized:
        raise InputError(
            f"input {index} is not a quantized tensor",
            where=f"input_quantized_idxs names {index}",
            advice="give torch.quantize_per_tensor(x, scale, zero_point, torch.quint8), or prepare without that index",
        )
    return x.dequantize()


def grid_of_output(program: Program, index: int) -> Grid:
    """The scale, zero point and dtype of an output that is quantized."""
    output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
    values = [leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node)]
    value = values[index] if index < len(values) else None
    if value is None or not str(value.target).startswith("quantized_decomposed.dequantize_per_tensor"):
        raise CustomConfigError(
            f"output {index} is not quantized, and is to be given as a quantized tensor",
            where="output_quantized_idxs",
            advice="leave the index out: the op that yields it is float",
        )
    scale, zero_point, _, _, dtype = value.args[1:6]
    quantized = torch.quint8 if dtype == torch.uint8 else torch.qint8
    return float(scale), int(zero_point), quantized  # type: ignore[arg-type]


# -- modules that are swapped --------------------------------------------------------------------------------------------


def quantize_modules(
    program: Program,
    prepared: Preparation,
    custom: ConvertCustomConfig,
    quant_type_of: Callable[[Any], QuantType | None],
) -> None:
    """Put quantized modules in the place of observed ones, and convert those that were prepared on their own."""
    from quantc.flows.fx.convert import convert_fx

    done: set[str] = set()
    for node in program.graph.find_nodes(op="call_module"):
        name = str(node.target)
        module = attribute(program.root, name)
        if name in done or not isinstance(module, nn.Module):
            continue
        done.add(name)
        if isinstance(module, ObservedGraphModule):
            quantized: nn.Module | None = convert_fx(module, custom)
        else:
            quantized = _quantized(program, node, module, prepared, custom, quant_type_of)
        if quantized is not None:
            watch(quantized, name, module.__dict__.get(SHAPES))
            parent, _, leaf = name.rpartition(".")
            setattr(program.root.get_submodule(parent), leaf, quantized)
    program.touch()


def _quantized(
    program: Program,
    node: fx.Node,
    module: nn.Module,
    prepared: Preparation,
    custom: ConvertCustomConfig,
    quant_type_of: Callable[[Any], QuantType | None],
) -> nn.Module | None:
    swaps = custom.observed_to_quantized_mapping
    kinds = [kind for kind, classes in swaps.items() if type(module) in classes]
    qconfig = getattr(module, "qconfig", None)
    if not kinds or qconfig is None:
        return None
    kind = quant_type_of(qconfig)
    if kind not in kinds:
        raise CustomConfigError(
            f"{node.target} is a {type(module).__name__}, for which there is a {' and a '.join(kinds)} version, "
            f"and its QConfig is {kind}",
            where="observed_to_quantized_custom_module_class",
            advice=f"list it under {kind!r}, or give it another QConfig in prepare",
        )
    if kind is QuantType.STATIC:
        _show_observer(node, module, prepared)
    made: nn.Module = swaps[kind][type(module)].from_observed(module)  # type: ignore[attr-defined]
    if kind is QuantType.STATIC:
        grids = _grids(program, node)
        made.register_forward_pre_hook(GivenQuantized(grids))
        made.register_forward_hook(dequantized)
    return made


def _show_observer(node: fx.Node, module: nn.Module, prepared: Preparation) -> None:
    """An observed module has the observer of its result, which stands behind it in the graph, under the usual name."""
    site = Site("", node.name, out=0)
    for group in prepared.program.plan.groups:
        if site in group.places and group.name in prepared.observers:
            observer = attribute(prepared.program.root, prepared.observers[group.name][0])
            module.activation_post_process = copy.deepcopy(observer)


def _grids(program: Program, node: fx.Node) -> dict[int, Grid]:
    """The grids of the tensors that a module is given quantized, by the number of the operand."""
    plan, places = program.plan, Places(program)
    count = len(places.operands(node))
    grids: dict[int, Grid] = {}
    for group in plan.groups:
        for index in range(count):
            if places.use(node, index) in group.places and isinstance(group.outcome, Quantize | Fixed):
                found: QParams = plan.qparams[group.name]
                dtype = QUANTIZED[group.outcome.spec.dtype]
                grids[index] = (float(found.scale), int(found.zero_point), dtype)
    return grids


class GivenQuantized:
    """Gives a module quantized tensors in the place of float ones that lie on their grids, as modules written for torch's
    quantized dtypes take them."""

    def __init__(self, grids: dict[int, Grid]) -> None:
        self.grids = grids

    def __call__(self, module: nn.Module, args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for index, place in enumerate(tensors):
            if index in self.grids:
                leaves[place] = torch.quantize_per_tensor(leaves[place], *self.grids[index])
        return pytree.tree_unflatten(leaves, spec)


def dequantized(module: nn.Module, args: Any, output: Any) -> Any:
    """What a module yields quantized, as float: it lies on its grid, and the next op takes it from there."""
    return pytree.tree_map_only(Tensor, lambda x: x.dequantize() if x.is_quantized else x, output)
