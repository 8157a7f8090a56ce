"""Train the embedded examples and write their weights: `python -m examples.train_digits [digits_cnn | digits_separable]`.

One thread and a fixed seed, so a second run on the same machine and torch gives the same file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import quantc
from quantc.cli.example import IMAGES, Digits, DigitsCNN, SeparableCNN, digits_split

BATCH_SIZE = 32
EXAMPLES = 4
DATA = Path(quantc.__file__).parent / "data"
MODELS: dict[str, tuple[type[nn.Module], int, float]] = {
    "digits_cnn": (DigitsCNN, 14, 5e-3),
    "digits_separable": (SeparableCNN, 25, 1e-2),
}
"""By the name of the file: the model, for how many epochs it is trained, and the highest rate."""


def shifted(images: Tensor) -> Tensor:
    """Each image moved by up to one pixel in each direction."""
    padded = pad(images, (1, 1, 1, 1))
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1).reshape(len(images), 9, 1, 8, 8)
    return windows[torch.arange(len(images)), torch.randint(9, (len(images),))]


def train(model: nn.Module, data: Digits, epochs: int, peak: float) -> None:
    steps = epochs * (len(data.images) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps)
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(data.images))[: steps // epochs * BATCH_SIZE]
        for chosen in torch.split(order, BATCH_SIZE):
            logits = model(shifted(data.images[chosen]))
            loss = cross_entropy(logits, data.labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    model.eval()


def accuracy(model: nn.Module, data: Digits) -> float:
    with torch.inference_mode():
        return float((model(data.images).argmax(1) == data.labels).double().mean())


def rounded(model: nn.Module) -> dict[str, Tensor]:
    """The weights as they are stored: float16, which halves the file; counters as they are."""
    state = model.state_dict()
    return {name: value.half() if value.is_floating_point() else value for name, value in state.items()}


def main(name: str = "digits_cnn", folder: Path = DATA) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    start = time.perf_counter()
    training, held_out = digits_split()
    build, epochs, peak = MODELS[name]
    model = build()
    train(model, training, epochs, peak)
    full = accuracy(model, held_out)
    stored = rounded(model)
    model.load_state_dict(stored)
    print(f"trained in {time.perf_counter() - start:.1f} s: {full:.2%} of {len(held_out.images)} held-out images")
    print(f"stored as float16: {accuracy(model, held_out):.2%}")
    images = (held_out.images[:EXAMPLES] * 16).to(torch.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    save_file({**stored, IMAGES: images}, path)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "digits_cnn")
