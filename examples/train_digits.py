"""Train the embedded example and write its weights: `python -m examples.train_digits`.

One thread and a fixed seed, so a second run on the same machine and torch gives the same file.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import quantc
from quantc.example import IMAGES, Digits, DigitsCNN, digits_split

EPOCHS = 14
BATCH_SIZE = 32
PEAK_RATE = 5e-3
EXAMPLES = 4
WEIGHTS = Path(quantc.__file__).parent / "data" / "digits_cnn.safetensors"


def shifted(images: Tensor) -> Tensor:
    """Each image moved by up to one pixel in each direction."""
    padded = pad(images, (1, 1, 1, 1))
    windows = padded.unfold(2, 8, 1).unfold(3, 8, 1).reshape(len(images), 9, 1, 8, 8)
    return windows[torch.arange(len(images)), torch.randint(9, (len(images),))]


def train(model: nn.Module, data: Digits) -> None:
    steps = EPOCHS * (len(data.images) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    model.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(data.images))[: steps // EPOCHS * BATCH_SIZE]
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


def main(path: Path = WEIGHTS) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    start = time.perf_counter()
    training, held_out = digits_split()
    model = DigitsCNN()
    train(model, training)
    full = accuracy(model, held_out)
    stored = rounded(model)
    model.load_state_dict(stored)
    print(f"trained in {time.perf_counter() - start:.1f} s: {full:.2%} of {len(held_out.images)} held-out images")
    print(f"stored as float16: {accuracy(model, held_out):.2%}")
    images = (held_out.images[:EXAMPLES] * 16).to(torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({**stored, IMAGES: images}, path)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
