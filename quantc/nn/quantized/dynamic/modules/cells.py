"""Dynamically quantized recurrent cells: a class is a row, as in `rnn`."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quantc.errors import SpecError
from quantc.integer.ops.recurrent import KINDS
from quantc.nn.dynamic_module import run_time_grid
from quantc.nn.kernel_ops import Run, engine_number, on_kernel, target
from quantc.nn.recurrent_weights import GATES, Recurrent
from quantc.targets.kernels import packing
from quantc.targets.kernels.dynamic_recurrent import CELLS


class RNNCellBase(Recurrent):
    """One step."""

    mode_of_class: ClassVar[str] = ""

    def __init_subclass__(cls, mode: str, of: type[nn.Module]) -> None:
        super().__init_subclass__()
        cls.mode_of_class, cls._FLOAT_MODULE = mode, of

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        dtype: torch.dtype = torch.qint8,
    ) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        self.mode = self.mode_of_class.replace("?", nonlinearity.upper())
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        gates = GATES[self.mode] * hidden_size
        self._hold_all({"weight_ih": (gates, input_size), "weight_hh": (gates, hidden_size)}, dtype)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        if not isinstance(mod, cls._FLOAT_MODULE):
            raise SpecError(
                f"{cls.__name__} is made of {cls._FLOAT_MODULE.__name__}, not of {type(mod).__name__}",
                where=f"{cls.__name__}.from_float",
            )
        made = cls(mod.input_size, mod.hidden_size, mod.bias, getattr(mod, "nonlinearity", "tanh"))
        made._take(mod)
        return made

    def forward(self, input: Tensor, hx: Any = None) -> Any:  # noqa: A002
        x = self.float_input(input)
        if x.dim() == 1:
            state = None if hx is None else self.given([part.unsqueeze(0) for part in self.listed(hx)])
            made = self.forward(x.unsqueeze(0), state)
            return self.given([part.squeeze(0) for part in self.listed(made)])
        zeros = [x.new_zeros(len(x), self.hidden_size)] * self.states
        state = zeros if hx is None else self.listed(hx)
        engine = engine_number()
        run = self.kernels.get(engine) or self.kernels.made(engine, lambda: self._kernel(target(), x, state))
        return run(x, *state)

    def _kernel(self, kind: str, x: Tensor, state: list[Tensor]) -> Run:
        if self.is_half and packing.has_halves():
            cell, packed = CELLS[self.kind], self.packed(kind)
            unused = (packing.UNUSED, packing.UNUSED)  # biases are packed with the weights
            if self.states > 1:
                return lambda x, *state: cell(x, state, *packed, *unused)
            return lambda x, h: cell(x, h, *packed, *unused)
        if self.is_half:
            of_input, of_state = self.products()
            step = KINDS[self.kind].step
            return lambda x, *state: self.given(list(step(of_input(x), state, of_state)))
        arguments = {
            "w_ih": self.tensor("weight_ih"),
            "w_hh": self.tensor("weight_hh"),
            "ih_scale": self.tensor("weight_ih_scale"),
            "hh_scale": self.tensor("weight_hh_scale"),
            "b_ih": self._buffers["bias_ih"],
            "b_hh": self._buffers["bias_hh"],
            "per_token": False,
            **run_time_grid(kind),
        }
        hx = state if self.states > 1 else state[0]
        return on_kernel(kind, f"{self.kind}_cell_dynamic", [x, hx], arguments)

    def extra_repr(self) -> str:
        without = "" if self.bias else ", bias=False"
        how = f", nonlinearity={self.nonlinearity}" if "?" in self.mode_of_class and self.nonlinearity != "tanh" else ""
        return f"{self.input_size}, {self.hidden_size}{without}{how}, dtype={self.dtype}"


class LSTMCell(RNNCellBase, mode="LSTM", of=nn.LSTMCell): ...


class GRUCell(RNNCellBase, mode="GRU", of=nn.GRUCell): ...


class RNNCell(RNNCellBase, mode="RNN_?", of=nn.RNNCell): ...


__all__ = ["GRUCell", "LSTMCell", "RNNCell", "RNNCellBase"]
