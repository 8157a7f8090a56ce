"""The ops that only move values, or choose among them: what they yield on integers are integers they were given."""

from __future__ import annotations

MOVES = (
    *("reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "aten.squeeze.default", "aten.squeeze.dims"),
    *("transpose", "permute", "expand", "repeat", "aten.repeat_interleave.self_int", "slice", "select", "narrow"),
    *("index", "index_select", "gather", "flip", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    *("contiguous", "clone", "detach", "split", "split_sizes", "chunk", "unbind", "amax", "amin"),
)
