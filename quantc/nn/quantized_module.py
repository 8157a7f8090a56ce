"""Base of all quantized modules: the grid of the result, and saving, copying and printing."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quantc.errors import ObservationError, RefusedError, SpecError
from quantc.nn.kernel_ops import KernelCache
from quantc.nn.quantized_tensor import INTEGERS, QuantizedTensor, check_quantized
from quantc.nn.scripting import refuse_script, refuse_trace
from quantc.nn.torch_tensors import State, entry_apart, plain_state
from quantc.spec.torch_dtypes import PLAIN
from quantc.support.finite_tensors import check_scales


class QuantizedModule(nn.Module):
    """A module whose tensors are plain: its state dict can be written to any file.

    Tensors are held by names that methods may have too, `weight` and `bias`. The grid of the result is saved as `scale`
    and `zero_point`, which has the dtype of the result's levels.
    """

    held: tuple[str, ...] = ()
    """The names of its tensors."""
    has_grid: ClassVar[bool] = True
    """True if results are on a grid of their own."""
    _FLOAT_MODULE: ClassVar[Any] = None
    __prepare_scriptable__ = refuse_script
    _slow_forward = refuse_trace

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.zero_point = 0
        self.out_dtype = torch.uint8
        """The dtype of the levels of its result."""
        self.kernels = KernelCache()
        self._buffers.update(dict.fromkeys(self.held))

    # -- tensors and the grid ------------------------------------------------------------------------------------------

    def hold(self, name: str, tensor: Tensor | None) -> None:
        self._buffers[name] = tensor
        self.kernels.clear()

    def tensor(self, name: str) -> Tensor:
        """A tensor that is there."""
        found = self._buffers[name]
        if found is None:
            raise SpecError(f"{type(self).__name__} has no {name}", advice="load a state dict, or use from_float")
        return found

    @property
    def grid(self) -> tuple[float, int]:
        """Scale and zero point of its result."""
        return self.scale, self.zero_point

    def set_grid(self, scale: float, zero_point: int) -> None:
        self.scale, self.zero_point = scale, zero_point

    def put_on_grid(self, observer: Any) -> None:
        """Take the grid that the observer of the results has found."""
        scale, zero_point, self.out_dtype = grid_of(observer, type(self).__name__)
        self.set_grid(scale, zero_point)

    def on_grid(self, levels: Tensor) -> QuantizedTensor:
        return QuantizedTensor(levels, *self.grid)

    def quantized_input(self, x: Any) -> QuantizedTensor:
        return check_quantized(x, type(self).__name__)

    # -- made of others ------------------------------------------------------------------------------------------------

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        """The quantized form of a float module that was observed."""
        raise RefusedError(
            f"{cls.__name__} is made of no float module",
            where=type(mod).__name__,
            advice="make one with its own arguments",
        )

    # -- torch's own ways ----------------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.has_grid:
            scale, zero_point = self.grid
            destination[f"{prefix}scale"] = torch.tensor(scale, dtype=torch.float64)
            destination[f"{prefix}zero_point"] = torch.tensor(zero_point, dtype=self.out_dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        own = plain_state(own, self.taken_apart, self.has_grid)
        grid = {"scale", "zero_point"} if self.has_grid else set()
        needed = (name for name in (*self.held, *sorted(grid)) if name not in self.optional())
        missing_keys.extend(f"{prefix}{name}" for name in needed if name not in own)
        error_msgs.extend(f"{prefix}: {why}" for why in self.why_not_load(own))
        children = tuple(f"{name}." for name in self._modules)
        unknown = set(own) - set(self.held) - grid
        if strict:
            unexpected_keys.extend(f"{prefix}{name}" for name in sorted(unknown) if not name.startswith(children))
        if not error_msgs:
            self.load(own)

    def taken_apart(self, name: str, value: Any) -> State:
        """The plain tensors of an entry of torch.ao's state dict."""
        return entry_apart(name, value, self.weight_parts, type(self).__name__)

    def weight_parts(self, name: str, weight: QuantizedTensor) -> State:
        """The tensors of a weight, by the names they are held by."""
        parts = weight.parts()
        return {name: parts["data"], f"{name}_scale": parts["scale"], f"{name}_zero_point": parts["zero_point"]}

    def optional(self) -> tuple[str, ...]:
        """Tensors that may be missing."""
        return ()

    def why_not_load(self, state: dict[str, Any]) -> list[str]:
        """Shape mismatches of a plain state with this module."""
        return [
            f"{name} has the shape {tuple(state[name].shape)}, and the module's is {tuple(mine.shape)}"
            for name, mine in self._buffers.items()
            if name in state and mine is not None and mine.dim() > 1 and state[name].shape != mine.shape
        ]

    def load(self, state: dict[str, Any]) -> None:
        for name in self.held:
            if name in state or name in self.optional():
                given = state.get(name)
                self._buffers[name] = None if given is None else given.detach().clone()
        if self.has_grid and "scale" in state and "zero_point" in state:
            self.set_grid(float(state["scale"]), int(state["zero_point"]))
            if state["zero_point"].dtype in INTEGERS:
                self.out_dtype = state["zero_point"].dtype
        self.kernels.clear()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """`.to`, `.half` and the like, which change the format of no number here: what is quantized stays as it is."""
        formats = {name: None if tensor is None else tensor.dtype for name, tensor in self._buffers.items()}
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in self._buffers.items():
            if tensor is not None and tensor.dtype is not formats[name]:
                self._buffers[name] = before[name]
        self.kernels.clear()
        return self

    def grid_text(self) -> str:
        kind = "" if self.out_dtype is torch.uint8 else f", dtype={self.out_dtype}"
        scale, zero_point = self.grid
        return f"scale={scale:.6g}, zero_point={zero_point}{kind}"

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"


def grid_of(observer: Any, where: str) -> tuple[float, int, torch.dtype]:
    """The grid that an observer of results has found, and the dtype of its levels."""
    if observer is None or not hasattr(observer, "calculate_qparams"):
        raise ObservationError(
            f"{where} is made of a module whose results were not observed",
            advice="prepare the model and run it on data before it is converted",
        )
    scale, zero_point = observer.calculate_qparams()
    check_scales(scale, f"the result of {where}")
    dtype = getattr(observer, "dtype", torch.quint8)
    plain = PLAIN.get(dtype, dtype)
    if plain not in INTEGERS or scale.numel() != 1:
        raise SpecError(
            f"results of {where} are to be {dtype} with {scale.numel()} scales",
            advice="observe results per tensor, as quint8, qint8 or qint32",
        )
    return float(scale), int(zero_point), plain
