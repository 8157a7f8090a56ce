"""The PT2 export flow: `prepare_pt2e`, `convert_pt2e`, and quantizers that annotate exported graphs."""

from quantc.flows.pt2e.quantize_pt2e import convert_pt2e, convert_to_pt2e, prepare_pt2e

__all__ = ["convert_pt2e", "convert_to_pt2e", "prepare_pt2e"]
