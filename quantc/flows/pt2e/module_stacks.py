"""The modules around a node of an exported graph, from torch.export's metadata."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from quantc.capture.export.exported import clean_path
from quantc.errors import ConfigError, suggest


def modules_around(node: fx.Node) -> Iterator[tuple[str, str]]:
    """The path and class of every module around a node, the outermost first."""
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        yield clean_path(path), kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def paths_of_type(graph: fx.Graph, kind: type[nn.Module]) -> list[str]:
    """The paths of all modules of a class. Raises ConfigError if there are none."""
    wanted = f"{kind.__module__}.{kind.__qualname__}"
    found = {path: name for node in graph.nodes for path, name in modules_around(node)}
    paths = [path for path, name in found.items() if name == wanted and path]
    if not paths:
        names = {name.rpartition(".")[2] for name in found.values()}
        raise ConfigError(
            f"the model has no {kind.__name__}",
            where="set_module_type",
            advice=suggest(kind.__name__, names, noun="types"),
        )
    return paths
