"""Support claims: rules that run on their backend target's kernels, or in its delegate, and reasons for those that do not.

A claim covers everything that the backend's modes ask of a rule: static, dynamic and weight-only quantization.
`quantc.testing.kernel_checks` and `delegate_checks` verify the tables, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quantc.patterns.table import Rule, RuleTable

STATE = dict.fromkeys(
    ("lstm", "gru", "rnn", "lstm-cell", "gru-cell", "rnn-cell"),
    "static: the state stays float, so the layer is torch's own; with run-time scales it runs on kernels",
)
FLOAT = {"upsample-linear": "it weighs its neighbours in float, and has no integer form"}

WITHOUT_KERNEL: Mapping[str, Mapping[str, str]] = {
    "x86": {
        **STATE,
        **FLOAT,
        "conv-add": "onednn adds to convolutions over one axis or two; over three the sum is an op of its own",
        "linear-prelu": "the slopes are applied in float to what the kernel yields",
    },
    "qnnpack": {
        **STATE,
        **FLOAT,
        "softmax-of-float": "what it reads is float",
    },
}
"""By target, then by rule: why it does not run on kernels. Every other rule of the target's backend claims that it does."""

STATEFUL = "the delegate multiplies its inputs; the state is float, and so are the products with it, on ExecuTorch's own kernels"
WITHOUT_DELEGATE: Mapping[str, str] = {
    "embedding": "ExecuTorch's own kernel looks rows up in int8, and brings those back to float alone",
    "lstm": STATEFUL,
    "gru": STATEFUL,
    "rnn": STATEFUL,
}
"""By rule: why ExecuTorch's delegate does not take it. Every other rule of that backend claims that it does."""


def in_delegate(table: RuleTable) -> RuleTable:
    """ExecuTorch's table; every rule claims the delegate, except those with a reason not to."""
    return replace(
        table, rules=tuple(rule if rule.name in WITHOUT_DELEGATE else _claiming(rule, "delegate") for rule in table)
    )


def on_kernels(table: RuleTable) -> RuleTable:
    """A backend's table; every rule claims its target's kernels, except those with a reason not to."""
    reasons = WITHOUT_KERNEL[table.name]
    return replace(table, rules=tuple(rule if rule.name in reasons else _claiming(rule, "kernel") for rule in table))


def _claiming(rule: Rule, level: str) -> Rule:
    return replace(rule, supports=rule.supports | {level})
