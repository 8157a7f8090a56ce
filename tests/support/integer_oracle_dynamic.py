"""The oracle for programs that find scales as they run: how a tensor is quantized, in NumPy's float32, as CONTRACTS.md
and torch's ops have it; what is then computed is what the oracle computes on integers of known scales."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

import quantc as qc
from quantc.ir.program import Program
from quantc.qdq.ops import is_choice, is_dequantize, is_quantize
from tests.support.integer_oracle import Oracle, plain
from tests.support.integer_oracle_judge import differing, lowered_values
from tests.support.integer_oracle_values import Terms

Array = np.ndarray[Any, Any]
ONE = np.float32


@dataclass(frozen=True)
class Chosen:
    """Scale and zero point of a tensor, or of each of its rows, in float32."""

    scale: Array
    zero_point: Array
    per_token: bool

    @staticmethod
    def of(x: Array, per_token: bool, zero_point: int | None, qmin: int, qmax: int, eps: float) -> Chosen:
        """From the smallest and the largest number; zero is always between them."""
        axis = -1 if per_token else None
        if x.size:
            ends = x.min(axis=axis, keepdims=per_token), x.max(axis=axis, keepdims=per_token)
        else:
            ends = (np.zeros((*x.shape[:-1], 1) if per_token else (), ONE),) * 2
        low, high = np.minimum(ends[0], ONE(0)), np.maximum(ends[1], ONE(0))
        if zero_point is None:
            scale = np.maximum((high - low) / ONE(qmax - qmin), ONE(eps))
            return Chosen(scale, np.clip(ONE(qmin) - np.rint(low / scale), ONE(qmin), ONE(qmax)), per_token)
        scale = np.maximum(np.maximum(-low, high) / ONE((qmax - qmin) / 2), ONE(eps))
        return Chosen(scale, np.full_like(scale, zero_point), per_token)

    def levels(self, x: Array, qmin: int, qmax: int) -> Array:
        """Integers: `round(x · (1/s)) + z`; for tokens torch adds the zero point before it rounds."""
        steps = x * (ONE(1) / self.scale)
        whole = np.rint(steps + self.zero_point) if self.per_token else np.rint(steps) + self.zero_point
        found: Array = np.clip(whole, ONE(qmin), ONE(qmax)).astype(np.int64)
        return found


class DynamicOracle(Oracle):
    """Runs a Q/DQ program whose scales may be found as it runs."""

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        if is_choice(node):
            return self._chosen(node, values)
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(source, fx.Node) and is_choice(source):
            return values[source]
        scale = values.get(node.args[1]) if len(node.args) > 1 and isinstance(node.args[1], fx.Node) else None
        if not isinstance(scale, Chosen):
            return super()._value(node, values)
        if is_quantize(node):
            qmin, qmax, dtype = (node.args[index] for index in (3, 4, 5))
            x = plain(values[node.all_input_nodes[0]]).detach().numpy()
            return torch.from_numpy(scale.levels(x, qmin, qmax)).to(dtype)  # type: ignore[arg-type]
        assert is_dequantize(node)
        ints = values[node.all_input_nodes[0]].numpy().astype(np.int64)
        return Terms(((ints - scale.zero_point.astype(np.int64), scale.scale.astype(np.float64)),))

    def _chosen(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Chosen:
        x = plain(values[node.all_input_nodes[0]]).detach().numpy()
        if "quantc" in str(node.target):
            per_token, zero_point, qmin, qmax, eps = node.args[1:]
        else:
            (qmin, qmax, eps), per_token, zero_point = node.args[1:4], False, None
        return Chosen.of(x, per_token, zero_point, qmin, qmax, eps)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Forms:
    """One program whose scales are found as it runs, in Q/DQ form and in integer form."""

    qdq: Program
    integer: Program

    @staticmethod
    def of(prepared: Program, **options: Any) -> Forms:
        both = {name: value for name, value in options.items() if name == "reduce_range"}
        return Forms(qc.convert(prepared, **both), qc.convert(prepared, to="integer", **options))

    def differences(self, inputs: Sequence[Any]) -> list[str]:
        """Where the integer program is not what NumPy says, each match fed the program's own values."""
        ours = lowered_values(self.integer, inputs)
        left = {node.name for node in self.integer.plan.left_float.rows}
        theirs = DynamicOracle(self.qdq, left).run(inputs, ours)
        found = [f"{name}: {why}" for name, value in ours.items() for why in differing(value, plain(theirs[name]))]
        return found if ours else ["no value of the integer program stands for one of the Q/DQ program"]

    def ops(self) -> list[str]:
        """The integer ops, in order."""
        return [str(node.target).split(".")[1] for node in self.integer.nodes() if "quantc" in str(node.target)]


def bits(value: Tensor) -> Array:
    found: Array = value.detach().numpy().view(np.int32)
    return found
