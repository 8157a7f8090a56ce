"""Tensors and sample inputs of a `.pt2` archive, rebuilt without executing anything from it.

torch itself would unpickle some of these without limits. Here raw tensors are views of their bytes, and pickles go
through torch's `weights_only` reader alone, with no fallback.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch._export.serde import schema
from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE, _dict_to_dataclass
from torch.utils import _pytree as pytree

from quantc.capture.pt2.archive_members import Members, check_entries, inside, open_archive
from quantc.capture.pt2.document_checks import vet
from quantc.capture.pt2.expression_checks import is_quiet
from quantc.errors import LoadError

FOLDERS = {"weights": "weight_", "constants": "tensor_"}
PLAIN_VALUES = (
    torch.Tensor,
    int,
    float,
    complex,
    bool,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
SampleInputs = tuple[tuple[Any, ...], dict[str, Any]]


def tensors(members: Members, model: str, kind: str) -> dict[str, torch.Tensor]:
    """Weights or constants of a program by name. Those that shared memory when saved share it again."""
    member = f"data/{kind}/{model}_{kind}_config.json"
    document = members.document(member)
    vet(document, schema.PayloadConfig, member)
    config: schema.PayloadConfig = _dict_to_dataclass(schema.PayloadConfig, document)  # type: ignore[no-untyped-call]
    raw: dict[str, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, payload in config.config.items():
        path = f"data/{kind}/{payload.path_name}"
        if not payload.path_name.startswith(FOLDERS[kind]):
            raise LoadError(f"{name} is stored as something other than a tensor", where=path)
        if payload.use_pickle:
            found[name] = _pickled_tensor(members.bytes(path), path)
            continue
        if path not in raw:
            raw[path] = members.tensor(path)
        found[name] = _tensor(name, payload, raw[path], path)
    return found


def _tensor(name: str, payload: schema.PayloadMeta, raw: torch.Tensor, path: str) -> torch.Tensor:
    meta = payload.tensor_meta
    if meta is None or meta.layout != schema.Layout.Strided or meta.dtype not in _SERIALIZE_TO_TORCH_DTYPE:
        raise LoadError(f"{name} is not described as a strided tensor of a known dtype", where=path)
    sizes, strides = ([_concrete(number, name, path) for number in numbers] for numbers in (meta.sizes, meta.strides))
    offset = _concrete(meta.storage_offset, name, path)
    dtype = _SERIALIZE_TO_TORCH_DTYPE[meta.dtype]
    on_meta = meta.device.type == "meta"
    if raw.numel() == 0 and math.prod(sizes) != 0 and not on_meta:
        raise LoadError(
            f"{name} has no data: the program was saved with fake weights",
            where=path,
            advice="export the model outside FakeTensorMode, with its real weights, and save it again",
        )
    try:
        if on_meta:
            tensor = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
        else:
            tensor = raw.view(dtype).as_strided(sizes, strides, offset)
        if meta.device.type not in ("cpu", "meta"):
            tensor = tensor.to(torch.device(meta.device.type, meta.device.index or 0))
        if payload.is_param:
            return torch.nn.Parameter(tensor, requires_grad=meta.requires_grad)
        return tensor.requires_grad_(meta.requires_grad)
    except (RuntimeError, ValueError, TypeError, OverflowError, AssertionError) as error:
        raise LoadError(
            f"{name} cannot be rebuilt: {_first_line(error)}",
            where=path,
            advice=f"the archive is damaged, or this machine lacks the device `{meta.device.type}` it was saved from",
        ) from error


def _concrete(number: schema.SymInt, name: str, path: str) -> int:
    if number.type == "as_int":
        return number.as_int
    raise LoadError(f"{name} has a size that is not a number", where=path)


def _pickled_tensor(data: bytes, path: str) -> torch.Tensor:
    value = unpickle(data, path)
    if isinstance(value, torch.Tensor):
        return value
    raise LoadError(f"a pickled weight is a {type(value).__name__}, not a tensor", where=path)


def sample_inputs(members: Members, model: str) -> SampleInputs | None:
    """Inputs a program was exported with; None if they were not saved."""
    path = f"data/sample_inputs/{model}.pt"
    data = members.bytes(path)
    if not data:
        return None
    match unpickle(data, path):
        case (tuple(args), dict(kwargs)):
            _check_values((args, kwargs), path)
            return args, kwargs
        case _:
            raise LoadError("the sample inputs are not positional and keyword arguments", where=path)


def _check_values(value: object, path: str) -> None:
    """Only tensors and plain values in plain containers. Keys end up in generated code, so they must be quiet."""
    stack = [value]
    while stack:
        item = stack.pop()
        if item is None or isinstance(item, PLAIN_VALUES):
            continue
        if isinstance(item, dict):
            _check_keys(item, path)
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif type(item) in _own_classes().values():
            stack.extend(vars(item).values())
        else:
            raise LoadError(f"the sample inputs hold a {type(item).__name__}", where=path)


def _check_keys(table: dict[object, object], path: str) -> None:
    for key in table:
        if isinstance(key, int | float) or (isinstance(key, str) and is_quiet(key)):
            continue
        raise LoadError(f"the sample inputs have the odd key {str(key)[:60]!r}", where=path)


def unpickle(data: bytes, path: str) -> object:
    """A pickle of tensors and plain values. One that refers to any other class or function is refused unread."""
    with inside(path), open_archive(io.BytesIO(data)) as archive:
        check_entries(archive, len(data))
    own = _own_classes()
    try:
        foreign = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))) - own.keys())
        if foreign:
            raise LoadError(
                f"a pickle in the archive would run or build {', '.join(foreign)[:200]}",
                where=path,
                advice="save the program without it (`program.example_inputs = None` drops sample inputs), or, if it is a class "
                "of yours and you trust the file, allow it with torch.serialization.add_safe_globals",
            )
        with torch.serialization.safe_globals(list(own.values())):
            return torch.load(io.BytesIO(data), weights_only=True)
    except LoadError:
        raise
    except Exception as error:
        # Anything can go wrong while reading hostile bytes; whatever it is, the user gets one kind of error.
        raise LoadError(f"a pickle in the archive does not read: {_first_line(error)}", where=path) from error


def _own_classes() -> dict[str, type]:
    """Data classes and named tuples this process registered as containers: its own code, so it may be built again."""
    return {f"{cls.__module__}.{cls.__qualname__}": cls for cls in _registered_types() if _is_record(cls)}


def _registered_types() -> Iterator[type]:
    # The table holds the function `namedtuple` beside classes.
    return (cls for cls in list[object](pytree.SUPPORTED_NODES) if isinstance(cls, type))


def _is_record(cls: type) -> bool:
    plain = dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    return plain and not cls.__module__.startswith("torch.")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
