"""Networks in a `.pte` and in `.onnx`, run by ExecuTorch and ONNX Runtime, beside their Q/DQ form.

    python -m benchmarks.deployed [NETWORK ...]

The numbers that `tests/targets/test_deployed_models.py` holds, as a table.
"""

from __future__ import annotations

import sys

from quantc.bench.race import quietly_on_one_thread
from quantc.support.sqnr import format_sqnr
from tests.support.deployed_networks import NETWORKS, TARGETS, forms, measured

COLUMNS = (
    "Q/DQ to float, dB",
    "to Q/DQ, dB",
    "integer form to Q/DQ, dB",
    "same answers",
    "in the integer form",
    "margin of others",
    "worst op, steps",
    "size",
    "on integers",
)


def main(names: list[str]) -> None:
    print("| network | file |", " | ".join(COLUMNS), "|")
    print("|---" * (len(COLUMNS) + 2) + "|")
    with quietly_on_one_thread():
        for name in names or NETWORKS:
            for target in TARGETS:
                found = measured(forms(name, target))
                cells = (
                    format_sqnr(found.loss),
                    format_sqnr(found.sqnr),
                    format_sqnr(found.integer_sqnr),
                    f"{found.same:.2%} of {found.answers:,}",
                    f"{found.integer_same:.2%}",
                    f"{found.margin:.2f}" if found.same < 1 else "",
                    f"{found.steps:.2f} of {found.ops}",
                    f"{found.size:.3f}",
                    f"{found.share:.1%}",
                )
                print(f"| {name} | {target} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
