"""Weight-only linear layers in the XNNPACK delegate.

XNNPACK multiplies floats by 8-bit or 4-bit weights with per-channel scales. Its partitioner does not expose that; it
needs one more config, for layers without bias: the pass `legalize-weights` adds the bias afterwards.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from quantc.targets.executorch.lazy_imports import XNNPACK, package
from quantc.targets.executorch.partitioning import IMPLICIT


def xnnpack_partitioner() -> Any:
    """XNNPACK's partitioner, extended to weight-only linear layers."""
    known = package(f"{XNNPACK}.partition.config").ALL_PARTITIONER_CONFIGS
    linear = _linear_config()
    configs = [linear if config.target_name == linear.target_name else config for config in known]
    return package(f"{XNNPACK}.partition.xnnpack_partitioner").XnnpackPartitioner(configs=configs)


@cache
def _linear_config() -> Any:
    """The config of linear layers, and those whose weight alone is quantized."""
    base = package(f"{XNNPACK}.partition.config.gemm_configs")
    kinds, nodes = package(f"{XNNPACK}.utils.quant_utils"), package(f"{XNNPACK}.utils.utils")

    class WeightOnlyLinear(base.LinearConfig):  # type: ignore[misc, name-defined]
        def get_deps(self, node: Any, ep: Any) -> tuple[bool, list[Any]]:
            weight = nodes.get_input_node(node, self.weight_idx)
            is_alone = kinds.is_dequant(weight) and not kinds.is_dequant(nodes.get_input_node(node, self.act_idx))
            if not is_alone:
                found: tuple[bool, list[Any]] = super().get_deps(node, ep)
                return found
            reason = self._why_not_alone(node, weight, ep)
            if reason:
                base.why(node, reason)
                return False, []
            weight.meta[IMPLICIT] = True
            return True, [weight, *weight.all_input_nodes]

        def _why_not_alone(self, node: Any, weight: Any, ep: Any) -> str:
            if not nodes.is_param_node(ep, nodes.get_input_node(weight, 0)):
                return "Expected weight to be a static param"
            if kinds.is_per_channel_group(weight) or not kinds.is_per_channel(weight):
                return "XNNPACK multiplies floats only with weights that have a scale for each channel"
            return "" if len(node.args) < 3 else "XNNPACK adds no bias to products of floats and integers"

    return WeightOnlyLinear
