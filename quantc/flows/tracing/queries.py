"""Calls that ask about a tensor without looking at its numbers, and those that hand its memory out."""

from __future__ import annotations

from typing import Any

QUERIES = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "element_size",
        "get_device",
        "__len__",
        "is_signed",
    ]
)
"""Calls that ask about a tensor without looking at its numbers."""
ATTRIBUTES = frozenset(
    [
        "shape",
        "ndim",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_cuda",
        "is_sparse",
        "is_quantized",
        "is_leaf",
        "is_meta",
        "is_mkldnn",
        "grad",
        "grad_fn",
        "names",
        "itemsize",
        "nbytes",
        "is_nested",
        "is_mps",
        "is_xpu",
        "is_cpu",
        "_version",
    ]
)


def is_query(func: Any) -> bool:
    """Whether a call asks about a tensor without looking at its numbers."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in ATTRIBUTES
    return name in QUERIES


SHAPES = frozenset({"shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "__len__", "layout"})
"""Queries that what stands for a tensor answers as well."""
MEMORY = frozenset(
    [
        "numpy",
        "__array__",
        "__dlpack__",
        "untyped_storage",
        "storage",
        "_typed_storage",
        "data_ptr",
        "const_data_ptr",
        "share_memory_",
        "data",
        "set_",
        "resize_",
        "resize_as_",
        "apply_",
        "map_",
        "map2_",
    ]
)
"""Calls after which a tensor can be written to without torch counting it: `_version` stays as it is."""


def name_of(func: Any) -> str:
    """What a torch function is called; for an attribute, what that is called."""
    name: str = getattr(func, "__name__", "").partition(".")[0]
    return getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else name


def hands_out_memory(func: Any) -> bool:
    """Whether what a function gives can be written through without torch seeing it."""
    return name_of(func) in MEMORY
