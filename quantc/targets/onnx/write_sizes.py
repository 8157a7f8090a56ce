"""ONNX writers of size arithmetic, on vectors of one integer, and of getitem."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from quantc.ir.dialect import target_name
from quantc.targets.onnx.op_writers import OpCall, Value, writes
from quantc.targets.onnx.write_elementwise import floored_integers


@writes("sym_size")
def sym_size(call: OpCall) -> Value:
    return call.size(call.tensor("x"), call.axis(call["dim"]))


@writes(target_name(operator.getitem))
def getitem(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    found = call.translation.values[source]
    if isinstance(found, str):
        raise call.refuse(f"{source.name} is written as one tensor, and taken apart")
    name = found[int(call.node.args[1])]  # type: ignore[arg-type]
    if not name:
        raise call.refuse(f"result {call.node.args[1]} of {source.name} has no ONNX form")
    return name


def _integer(call: OpCall, given: Any) -> str:
    return call.translation.value(given) if isinstance(given, fx.Node) else call.writer.numbers([int(given)])


def _binary(op: str, call: OpCall) -> Value:
    left, right = call.node.args[:2]
    return call.emit(op, _integer(call, left), _integer(call, right))


ARITHMETIC = {operator.add: "Add", operator.sub: "Sub", operator.mul: "Mul"}
ARITHMETIC_ENDS = {torch.sym_max: "Max", torch.sym_min: "Min", operator.mod: "Mod"}

for function, name in {**ARITHMETIC, **ARITHMETIC_ENDS}.items():
    writes(target_name(function))(partial(_binary, name))


@writes(target_name(operator.floordiv))
def floor_divided(call: OpCall) -> Value:
    return floored_integers(call, *(_integer(call, given) for given in call.node.args[:2]))


@writes(target_name(operator.neg))
def negate(call: OpCall) -> Value:
    return call.emit("Neg", _integer(call, call.node.args[0]))


@writes(target_name(torch.sym_int))
def as_integer(call: OpCall) -> Value:
    return _integer(call, call.node.args[0])
