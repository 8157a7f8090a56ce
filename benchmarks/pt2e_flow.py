"""Time of prepare_pt2e and convert_pt2e on a chain of conv-bn-relu-add blocks: quantc's flow and torchao's.

    python benchmarks/pt2e_flow.py --blocks 800 --limit 150

Each contender is given the same exported chain. torchao's own flow is run on longer and longer chains until one takes
longer than `--limit` seconds, and quantc's on each of them and on the longest. Ranges are the extremes of the data in
all of them (`--observer histogram` takes the defaults), so that the flows are compared and not the searches for ranges.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from quantc.flows import pt2e
from quantc.flows.pt2e.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config
from quantc.nn.observers import MinMaxObserver

X = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        nn.init.constant_(self.norm.weight, 0.01)  # a long chain of sums stays finite

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x))) + x


def with_extremes(config: Any, observer: Any) -> Any:
    """A config whose activations are observed by their extremes."""
    act = dataclasses.replace(config.input_activation, observer_or_fake_quant_ctr=observer.with_args(eps=2**-12))
    return dataclasses.replace(config, input_activation=act, output_activation=act)


def own(histogram: bool) -> Any:
    config = get_symmetric_quantization_config(is_per_channel=True)
    return XNNPACKQuantizer().set_global(config if histogram else with_extremes(config, MinMaxObserver))


def theirs(histogram: bool) -> Any:
    from torchao.quantization.pt2e import MinMaxObserver as Extremes

    other: Any = import_module("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    config = other.get_symmetric_quantization_config(is_per_channel=True)
    return other.XNNPACKQuantizer().set_global(config if histogram else with_extremes(config, Extremes))


def seconds(
    exported: Any, quantizer: Any, prepare: Callable[..., Any], convert: Callable[..., Any]
) -> tuple[float, float]:
    """The seconds of prepare and of convert."""
    module = exported.module()
    start = time.perf_counter()
    prepared = prepare(module, quantizer)
    ready = time.perf_counter()
    with torch.no_grad():
        prepared(X)
    calibrated = time.perf_counter()
    convert(prepared)
    return ready - start, time.perf_counter() - calibrated


def run(blocks: int, histogram: bool, is_given_time: bool) -> float:
    """Time all contenders on one chain and print it; how long torchao took, or infinity if it was left out."""
    from torchao.quantization.pt2e import quantize_pt2e as torchao

    torch.manual_seed(0)
    exported = torch.export.export(nn.Sequential(*(Block() for _ in range(blocks))).eval(), (X,))
    ours = pt2e.prepare_pt2e, pt2e.convert_pt2e
    contenders: dict[str, Any] = {"quantc": (own, *ours), "quantc, ExecuTorch's quantizer": (theirs, *ours)}
    if is_given_time:
        contenders["torchao, ExecuTorch's quantizer"] = (theirs, torchao.prepare_pt2e, torchao.convert_pt2e)
    took: dict[str, float] = {}
    for name, (make, prepare, convert) in contenders.items():
        before, after = seconds(exported, make(histogram), prepare, convert)
        took[name] = before + after
        print(
            f"{blocks:5} blocks  {name:32} prepare {before:7.2f} s  convert {after:7.2f} s  both {before + after:7.2f} s",
            flush=True,
        )
    if not is_given_time:
        return float("inf")
    slowest = took["torchao, ExecuTorch's quantizer"]
    for name in list(took)[:2]:
        print(f"{blocks:5} blocks  {name:32} {slowest / took[name]:.1f} times as fast as torchao")
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=800)
    parser.add_argument(
        "--limit", type=float, default=150.0, help="how long torchao may be expected to take, in seconds"
    )
    parser.add_argument("--observer", choices=["minmax", "histogram"], default="minmax")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run(2, options.observer == "histogram", True)  # imports and caches
    blocks, last, expected = 100, 0.0, 0.0
    while blocks < options.blocks and 16 * last < options.limit:
        last = run(blocks, options.observer == "histogram", True)
        done, blocks = blocks, 4 * blocks
        expected = last * (options.blocks / done) ** 2  # torchao's time grows with the square
    run(options.blocks, options.observer == "histogram", expected < options.limit)


if __name__ == "__main__":
    main()
