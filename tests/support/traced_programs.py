"""Random eager models, as source: layers, views, aliases, writes in place, branches, loops and shared weights.

A statement is a line, and makes few torch calls. Two kinds of values: images of shape (b, 4, 6, 6) and rows of shape (b, 8).
Conditions look at the input alone, so that the float model and the quantized one take the same way."""

from __future__ import annotations

import copy
import functools
import linecache
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NAMES = {"copy": copy, "functools": functools, "np": np, "torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint}
"""What the source of a model can name."""
IMAGE, ROWS = "image", "rows"

LAYERS = {
    "conv": "nn.Conv2d(4, 4, 3, padding=1)",
    "plain": "nn.Conv2d(4, 4, 1, bias=False)",
    "deep": "nn.Conv2d(4, 4, 3, padding=1, groups=4)",
    "wide": "nn.Conv2d(8, 4, 1)",
    "norm": "nn.BatchNorm2d(4)",
    "relu": "nn.ReLU()",
    "relu_in_place": "nn.ReLU(inplace=True)",
    "relu6": "nn.ReLU6()",
    "pool": "nn.MaxPool2d(3, 1, 1)",
    "mean": "nn.AvgPool2d(3, 1, 1)",
    "fc": "nn.Linear(8, 8)",
    "head": "nn.Linear(4, 8)",
    "whole": "nn.Linear(144, 8)",
    "rows_norm": "nn.LayerNorm(8)",
    "dropout": "nn.Dropout()",
}

STRAIGHT: dict[str, list[str]] = {
    IMAGE: [
        "{t} = self.{conv}({a})",
        "{t} = self.{conv}({a})",
        "{t} = self.{relu}(self.{norm}(self.{conv}({a})))",
        "{t} = self.{relu_in_place}(self.{norm}(self.{plain}({a})))",
        "{t} = self.{norm}(self.{conv}({a}))",
        "{t} = self.{deep}({a})",
        "{t} = self.{relu}({a})",
        "{t} = F.relu({a})",
        "{t} = self.{relu6}({a})",
        "{t} = {a} + {b}",
        "{t} = F.relu({a} + {b})",
        "{t} = self.{relu_in_place}({a} + self.{norm}(self.{conv}({b})))",
        "{t} = {a} * {b}",
        "{t} = {a} - {b}",
        "{t} = {a} * 0.5",
        "{t} = {a} + 0.25",
        "{t} = 1 - {a}",
        "{t} = self.{wide}(torch.cat([{a}, {b}], 1))",
        "{t} = torch.cat([{a}[:, :2], {b}[:, 2:]], 1)",
        "{t} = torch.cat({a}.chunk(2, 1)[::-1], 1)",
        "{t} = {a}.flip(1)",
        "{t} = {a}.view({a}.shape[0], -1).view({a}.shape)",
        "{t} = {a}.flatten(2).transpose(1, 2).reshape({a}.shape[0], 6, 6, 4).permute(0, 3, 1, 2)",
        "{t} = self.{pool}({a})",
        "{t} = self.{mean}({a})",
        "{t} = {a}.softmax(1)",
        "{t} = {a}.sigmoid()",
        "{t} = torch.tanh({a})",
        "{t} = self.{dropout}({a})",
        "{t} = F.hardswish({a})",
        "{t} = {a} * {r}[:, :4, None, None]",
        "{t} = self.{conv}({a})[:, :, :6, :6]",
        "{t} = F.conv2d({a}, self.{conv}.weight, padding=1)",
        "{t} = {a} - {a}.mean((2, 3), keepdim=True)",
        "{t} = self.block({a})",
        "{t} = {a}",
    ],
    ROWS: [
        "{t} = self.{head}({a}.mean((2, 3)))",
        "{t} = self.{whole}({a}.flatten(1))",
        "{t} = self.{head}(F.adaptive_avg_pool2d({a}, 1).flatten(1))",
        "{t} = self.{fc}({r})",
        "{t} = F.relu(self.{fc}({r}))",
        "{t} = self.{rows_norm}({r})",
        "{t} = {r} + {s}",
        "{t} = F.gelu({r})",
        "{t} = F.linear({r}, self.{fc}.weight, self.{fc}.bias)",
        "{t} = torch.stack([{r}, {s}]).sum(0)",
        "{t} = torch.cat([{r}[:, 4:], {s}[:, :4]], -1)",
        "{t} = {r}.softmax(-1)",
        "{t} = {r} @ self.{fc}.weight.t()",
        "{t} = torch.einsum('bi,oi->bo', {r}, self.{fc}.weight)",
    ],
}
"""What a graph can hold."""

WRITES: dict[str, list[str]] = {
    IMAGE: [
        "{a}.add_({b})",
        "{a} += {b}",
        "{a} *= 0.5",
        "{a}.mul_(0.75)",
        "F.relu({a}, inplace=True)",
        "self.{relu_in_place}({a})",
        "{a}.relu_()",
        "{a}[:, 0] = 0",
        "{a}[:, 1:3] *= 0.5",
        "{a}[:, 1] = {b}[:, 2]",
        "{a}.view(-1)[::3] = 0.125",
        "{a}.flatten()[:5] = 0.5",
        "{a}.clamp_(-1, 1)",
        "{a}.copy_({b} * 0.5)",
        "torch.add({a}, 0.25, out={a})",
        "{a}.transpose(2, 3).mul_(0.5)",
        "{a}.detach().add_(0.125)",
        "{a}.chunk(2, 1)[0].add_(0.25)",
        "{a}[{a} < 0] = 0",
        "{t} = {a}.detach()",
        "{t} = {a}.view({a}.shape)",
        "{t} = {a}[:]",
        "{t} = {a}.contiguous()",
        "{t} = {a}.masked_fill({a} > 1, 1.0)",
    ],
    ROWS: [
        "{r}.add_({s})",
        "{r} += 0.25",
        "{r}[:, 0] = 0",
        "{r}.data.mul_(0.5)",
        "{r}[:, ::2] = {s}[:, 1::2]",
        "{t} = {r}.T.contiguous().T",
        "{t} = {r}.unsqueeze(1).squeeze(1)",
        "{t} = {r}.expand(2, -1, -1).mean(0)",
        "{t}, _ = {r}.sort(-1)",
    ],
}
"""What writes to memory, and what shares it."""

WILD: dict[str, list[str]] = {
    IMAGE: [
        "str({a})",
        "{a}.sum().item()",
        "self.kept.append({a})",
        "self.kept.append({a})",
        "{a}.data.mul_(0.5)",
        "{a}.detach().numpy()[:, 0] = 0.25",
        "{t} = torch.from_numpy(np.tanh({a}.detach().numpy()))",
        "{t} = {a}.double().mul(0.5).float()",
        "{t} = {a} * float({a}.shape[0] > 1)",
        "{t} = {a} / max(1.0, {a}.abs().max().item())",
        "{t} = torch.stack([self.{conv}(row) for row in {a}])",
        "{t} = sum(self.{plain}(row[None]) for row in {a}) + {a}",
        "{t} = functools.reduce(torch.add, [self.{conv}({a}), {b}, {a}])",
        "{t} = self.helper({a}, {b})",
        "{t} = checkpoint(self.{conv}, {a}, use_reentrant=False)",
        "{t} = copy.copy({a})",
    ],
    ROWS: [
        "{t} = torch.tensor({r}.tolist())",
        "{t} = self.{fc}({r}[{r}[:, 0] > -100])",
        "self.kept.append({r})",
        "{t} = {r}.new_zeros({r}.shape).index_add_(0, torch.arange({r}.shape[0]), {s})",
    ],
}
"""What no tracer captures."""


@dataclass
class Source:
    """A model that is being written."""

    draw: random.Random
    tables: Sequence[dict[str, list[str]]]
    layers: dict[str, str] = field(default_factory=dict)
    has_block: bool = True
    names: int = 0

    def layer(self, kind: str) -> str:
        """A layer of a kind: a new one, or one that there is."""
        known = [name for name, found in self.layers.items() if found == kind]
        if known and self.draw.random() < 0.3:
            return self.draw.choice(known)
        name = f"{kind}{len(self.layers)}"
        self.layers[name] = kind
        return name

    def line(self, values: dict[str, str], *, is_new: bool) -> str:
        """A statement on values, by name and kind; a new value is added to these."""
        wanted = IMAGE if self.draw.random() < 0.75 or ROWS not in values.values() else ROWS
        template = self.draw.choice(self.draw.choice(self.tables)[wanted])
        images = [name for name, kind in values.items() if kind == IMAGE]
        rows = [name for name, kind in values.items() if kind == ROWS]
        if ("{r}" in template and not rows) or ("self.block" in template and not self.has_block):
            template, wanted = "{t} = self.{head}({a}.mean((2, 3)))", ROWS
        own = [name for name in (images if wanted == IMAGE else rows) if name != "x"]
        if is_new or not own:
            self.names += 1
            target = f"v{self.names}"
        else:
            target = self.draw.choice(own)
        given = {"a": images, "b": images, "r": rows, "s": rows}
        words = {key: self.draw.choice(names) for key, names in given.items() if names}
        words |= {kind: self.layer(kind) for kind in LAYERS if f"{{{kind}}}" in template}
        if "{t}" in template and (is_new or not own):
            values[target] = wanted
        return template.format(t=target, **words)

    def body(self, values: dict[str, str], length: int, *, is_wild: bool) -> list[str]:
        """Statements, of which some are branches and loops."""
        lines: list[str] = []
        for _ in range(length):
            chance = self.draw.random()
            if is_wild and chance < 0.12:
                head = self.draw.choice(["if is_positive:", "for _ in range(turns):", "if turns > 1:"])
                inner = [self.line(dict(values), is_new=False) for _ in range(self.draw.randint(1, 2))]
                assigned = {line.split(" = ")[0].split(",")[0] for line in inner if " = " in line}
                if all(not name.startswith("v") or name in values or not name[1:].isdigit() for name in assigned):
                    lines += [head, *(f"    {line}" for line in inner)]
            else:
                lines.append(self.line(values, is_new=chance < 0.8))
        return lines


def source_of(seed: int, *, length: int = 8, is_wild: bool = True) -> str:
    """The source of a random model."""
    draw = random.Random(seed)
    tables = [STRAIGHT, STRAIGHT, WRITES, WILD] if is_wild else [STRAIGHT]
    block = Source(draw, tables[:3], has_block=False)
    inner: dict[str, str] = {"x": IMAGE}
    block_lines = block.body(inner, draw.randint(1, 3), is_wild=False)
    last = [name for name, kind in inner.items() if kind == IMAGE][-1]
    model = Source(draw, tables)
    values: dict[str, str] = {"x": IMAGE}
    lines = [f"v0 = self.{model.layer('conv')}(x)"]
    values["v0"] = IMAGE
    lines += model.body(values, length, is_wild=is_wild)
    given = draw.sample(sorted(values), k=min(len(values), draw.randint(1, 3)))
    newest = list(values)[-1]
    results = ", ".join(f'"{name}": {name}' for name in dict.fromkeys([newest, *given]))
    start = ["self.kept = []", "is_positive, turns = bool(x.mean().item() > 0), 1 + int(x.std().item() > 1)"]
    return "\n".join(
        [
            *_class("Block", block.layers, [], block_lines, last),
            "",
            *_class("Model", model.layers, start if is_wild else [], lines, f"{{{results}}}"),
        ]
    )


def _class(name: str, layers: dict[str, str], start: list[str], lines: list[str], result: str) -> list[str]:
    made = [f"self.{name} = {LAYERS[kind]}" for name, kind in layers.items()]
    block = ["self.block = Block()"] if name == "Model" else []
    helper = ["    def helper(self, a, b):", "        c = F.relu(a) + b", "        return c.mul_(0.5)"] if block else []
    return [
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in [*made, *block]),
        *helper,
        "    def forward(self, x):",
        *(f"        {line}" for line in [*start, *lines, f"return {result}"]),
    ]


def built(source: str, seed: int) -> nn.Module:
    """The model of a source, with weights that go by the seed."""
    name = f"<random model {seed}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": f"random_model_{seed}", **NAMES}
    exec(compile(source, name, "exec"), scope)  # noqa: S102 (it was written above)
    torch.manual_seed(seed)
    model: nn.Module = scope["Model"]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def batches(seed: int, count: int = 4, size: int = 3) -> list[Tensor]:
    """Inputs of all the ways that conditions tell apart, in turn."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        x = torch.rand(size, 4, 6, 6, generator=draw) * 2 - 1
        scale, shift = (1.0, 3.0)[number % 2], (0.1, -0.1)[number // 2 % 2]
        rows.append((x - x.mean() + shift) * scale)
    return rows
