"""Rule synthesis: a rule for a single op, for a backend that has none."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch._ops import OpOverload

from quantc.annotate.quantizer import Backend
from quantc.annotate.rule_trials import Trial
from quantc.inspect.changes import AddRule
from quantc.ir.dialect import argument, arguments, op_name, traits_of
from quantc.ir.mac_count import is_product
from quantc.ir.op_row import Trait
from quantc.ir.types import dtype_of
from quantc.spec.formats import Role


def rule_for(node: fx.Node, trial: Trial) -> AddRule | None:
    """Rule that claims a node by its op: activations are quantized, and weights of convs and matmuls. A result that
    only holds values of the input shares its scale.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return None
    act = _role(trial.backend, Role.ACT)
    names = _tensor_operands(node, target)
    if act is None or not names:
        return None
    weight = _role(trial.backend, Role.WEIGHT) if is_product(node) else None
    roles: dict[str, str] = {}
    for name in names:
        value = argument(node, name.rstrip("*"))
        is_constant = isinstance(value, fx.Node) and value.op == "get_attr"
        if not is_constant:
            roles[name.rstrip("*")] = act
        elif weight is not None and name == "w":
            roles[name] = weight
    if not roles:
        return None
    keeps = Trait.PRESERVES_VALUES in traits_of(node)
    roles["out"] = f"like {next(iter(roles))}" if keeps else act
    return AddRule(op_name(node), _free_name(node, trial), " ".join(_args(node, target)), tuple(roles.items()))


def _tensor_operands(node: fx.Node, target: OpOverload) -> list[str]:
    """The operands that are given float tensors, lists with a star."""
    found = []
    for row in arguments(target):
        value = argument(node, row.name)
        if _is_float(value):
            found.append(row.name)
        elif isinstance(value, list | tuple) and value and all(map(_is_float, value)):
            found.append(f"{row.name}*")
    return found


def _is_float(value: object) -> bool:
    dtype = dtype_of(value)
    return dtype is not None and dtype.is_floating_point


def _args(node: fx.Node, target: OpOverload) -> Iterator[str]:
    """Operands in their order, as far as the last that is a tensor; the others are anything."""
    tensors = _tensor_operands(node, target)
    plain = [name.rstrip("*") for name in tensors]
    rows = [row.name for row in arguments(target)]
    last = max(rows.index(name) for name in plain)
    for name in rows[: last + 1]:
        yield tensors[plain.index(name)] if name in plain else "_"


def _role(backend: Backend, role: Role) -> str | None:
    """The backend's first role of a kind that a rule may name."""
    return next((name for name in backend.roles if backend.outcome(name).spec.role is role), None)


def _free_name(node: fx.Node, trial: Trial) -> str:
    base = op_name(node).removeprefix("aten.").removesuffix(".default").replace(".", "_").lower()
    name, number = f"{base}-alone", 2
    while name in trial.table:
        name, number = f"{base}-alone-{number}", number + 1
    return name
