"""The NPU in NumPy: runs the instructions of one region, on int8 tensors."""

import base64
from typing import Any

import numpy as np
import torch


class Interpreter:
    def __init__(self, region: dict[str, Any]) -> None:
        self.region = region

    def __call__(self, *inputs: torch.Tensor) -> Any:
        self.values = dict(zip(self.region["in"], (x.numpy() for x in inputs), strict=True))
        for row in self.region["code"]:
            given = {name: self.read(value) for name, value in row.items() if name not in ("op", "out")}
            self.values[row["out"]] = getattr(self, row["op"])(**given)
        results = tuple(torch.from_numpy(np.ascontiguousarray(self.values[name])) for name in self.region["out"])
        return results[0] if len(results) == 1 else results

    def read(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("%"):
            return self.values[value]
        if isinstance(value, list):
            return [self.read(item) for item in value]
        if isinstance(value, dict):
            return np.frombuffer(base64.b64decode(value["data"]), value["dtype"]).reshape(value["shape"])
        return value

    def shifted(self, acc: Any, shift: Any, low: int, high: int) -> Any:
        """`acc * 2^-shift`, rounded half up and saturated."""
        acc, shift = acc.astype(np.int64), np.asarray(shift, np.int64)
        half = np.where(shift > 0, 1 << np.maximum(shift - 1, 0), 0)
        moved = (acc + half) >> np.maximum(shift, 0) << np.maximum(-shift, 0)
        return np.clip(moved, low, high).astype(np.int8)

    def conv(self, x, w, bias, stride, padding, dilation, groups, shift, qmin, qmax, **_):
        windows = self.windows(x, w.shape[2:], stride, padding, dilation, 0)
        n, _, rows, columns = windows.shape[:4]
        parts = windows.reshape(n, groups, -1, rows, columns, *w.shape[2:]).transpose(1, 0, 3, 4, 2, 5, 6)
        left = parts.reshape(groups, n * rows * columns, -1).astype(np.float64)  # exact: sums stay below 2^53
        acc = left @ w.reshape(groups, w.shape[0] // groups, -1).astype(np.float64).transpose(0, 2, 1)
        acc = acc.reshape(groups, n, rows, columns, -1).transpose(1, 0, 4, 2, 3).reshape(n, -1, rows, columns)
        return self.shifted(acc + (0 if bias is None else bias[:, None, None]), shift, qmin, qmax)

    def windows(self, x, kernel, stride, padding, dilation, fill):
        whole = np.pad(x, [(0, 0), (0, 0), *((pad, pad) for pad in padding)], constant_values=fill)
        spans = [(size - 1) * step + 1 for size, step in zip(kernel, dilation, strict=True)]
        seen = np.lib.stride_tricks.sliding_window_view(whole, spans, (2, 3))
        return seen[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]

    def linear(self, x, w, bias, shift, qmin, qmax, **_):
        acc = x.astype(np.float64) @ w.astype(np.float64).T
        return self.shifted(acc + (0 if bias is None else bias), shift, qmin, qmax)

    def sum(self, xs, multipliers, offset, shift, qmin, qmax, **_):
        acc = sum(x.astype(np.int64) * factor for x, factor in zip(xs, multipliers, strict=True))
        return self.shifted(acc + (0 if offset is None else offset), shift, qmin, qmax)

    def requantize(self, x, shift, qmin, qmax, **_):
        return self.shifted(x, shift, qmin, qmax)

    def lookup(self, x, table, **_):
        return table[x.astype(np.int64) + 128]

    def max_pool2d(self, x, kernel_size, stride, padding, dilation, **_):
        window = (kernel_size, stride or kernel_size, padding, dilation)
        return self.windows(x, *(pair * 2 if len(pair) == 1 else pair for pair in window), -128).max((4, 5))

    def flatten(self, x, start_dim, end_dim, **_):
        return x.reshape(*x.shape[: start_dim % x.ndim], -1, *x.shape[end_dim % x.ndim + 1 :])
