"""Constants that take the values a plan has for them."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, fx, nn

from quantc.errors import CalibrationError
from quantc.ir.program import Program
from quantc.ir.site_index import Places, rewire
from quantc.ir.sites import Site
from quantc.observe.module import behind, observer_nodes
from quantc.text.digests import digest


def put_fitted(program: Program) -> int:
    """Give constants the values that `plan.fitted` has for their readers, and clear it. Readers that it does not name keep
    the float ones. Returns the number of operands. CalibrationError if a constant has changed since."""
    fitted = program.plan.fitted
    if not fitted:
        return 0
    check_fitted(program)
    places = Places(program)
    wanted: dict[fx.Node, dict[int, Tensor]] = {}
    for site, values in fitted.items():
        wanted.setdefault(places.node(site), {})[site.operand or 0] = values
    for value in dict.fromkeys(places.value(site) for site in fitted):
        reads = places.reads(value)
        found = [wanted.get(reader, {}).get(operand) for reader, operand in reads]
        kinds = {id(each): each for each in found}
        if len(kinds) == 1 and _is_alone(program, value):
            _set(program, value, found[0])
            continue
        for key, tensor in kinds.items():
            own = [read for read, each in zip(reads, found, strict=True) if id(each) == key]
            if tensor is not None:
                _split(program, places, value, own, tensor)
    program.plan.fitted, program.plan.fitted_to = {}, {}
    return len(fitted)


def check_fitted(program: Program) -> None:
    """CalibrationError if a constant is no longer what `plan.fitted` was fitted to."""
    if not program.plan.fitted_to:
        return
    places, observers = Places(program), observer_nodes(program)
    for site, known in program.plan.fitted_to.items():
        tensor = program.tensor(behind(places.value(site), observers))
        found = None if tensor is None else digest(tensor)
        if found is not None and found != known:
            raise CalibrationError(
                f"the constant that {site} reads has changed since qc.recover fitted values to it",
                where=f"{program.name}, {site}",
                advice="give the new weights to the program that qc.recover took, calibrate that with "
                'collect="recover", and call qc.recover again',
            )


def _is_alone(program: Program, value: fx.Node) -> bool:
    """True if no other node reads the constant, under any of its names."""
    own = program.tensor(value)
    nodes = [node for _, graph in program.graphs() for node in graph.find_nodes(op="get_attr")]
    return not any(node is not value and program.tensor(node) is own for node in nodes)


def _set(program: Program, value: fx.Node, tensor: Tensor | None) -> None:
    """Replace the tensor of a constant under its name."""
    path, _, name = str(value.target).rpartition(".")
    holder = program.owner(value.graph).get_submodule(path)
    if isinstance(getattr(holder, name), nn.Parameter) and tensor is not None:
        holder._parameters[name] = nn.Parameter(tensor, requires_grad=False)
    else:
        holder._buffers[name] = tensor
    program.touch()


def _split(program: Program, places: Places, value: fx.Node, reads: list[tuple[fx.Node, int]], tensor: Tensor) -> None:
    """A constant of their own for some of the readers."""
    new = program.constant(str(value.target), tensor, before=min(reader for reader, _ in reads))
    old_site, site = places.out(value), Site(places.paths[value.graph], new.name, out=0)
    for reader, operand in reads:
        rewire(program, reader, {operand: new})
    taken = {places.use(reader, operand) for reader, operand in reads}
    program.plan.groups = tuple(
        replace(group, values=tuple(dict.fromkeys((*(each for each in group.values if each != old_site), site))))
        if old_site in group.values and not taken.isdisjoint(group.places)
        else group
        for group in program.plan.groups
    )
