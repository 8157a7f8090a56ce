"""The backend of docs/write-a-backend.md, checked and put to use on a small model.

python -m examples.five_ops_backend
"""

from quantc import INT8, INT8_WEIGHT, Backend
from quantc.ir.decisions import Fixed
from quantc.patterns import Rule, RuleTable, aten, const, op, optional

conv = aten.conv("x", const("w"), const("b?"))
linear = aten.linear("x", const("w"), const("b?"))
product = {"x": "act", "w": "weight", "out": "act"}

FIVE = Backend(
    "five",
    RuleTable(
        "five",
        (
            Rule("conv", conv >> optional(aten.clamp), product, supports={"qdq"}),
            Rule("linear", linear >> optional(aten.clamp), product, supports={"qdq"}),
            Rule("add", aten.add, {"x": "act", "y": "act", "out": "act"}, supports={"qdq"}),
            Rule("sigmoid", aten.sigmoid, {"x": "act", "out": "unit"}, supports={"qdq"}),
            Rule("move", op("max_pool2d", "flatten", args="x"), {"x": "pass", "out": "like x"}, supports={"qdq"}),
        ),
    ),
    roles={"act": INT8, "weight": INT8_WEIGHT, "unit": Fixed(1 / 256, -128, INT8)},
    summary="five ops, int8 throughout",
)


def main() -> None:
    import torch
    from torch import nn

    import quantc as qc
    from quantc.testing import check_backend

    report = check_backend(FIVE)
    print(report)
    report.raise_if_failed()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)).eval()
    batches = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    prepared = qc.prepare(qc.capture(model, (batches[0],)), FIVE)
    qc.calibrate(prepared, batches)
    quantized = qc.convert(prepared)
    print(prepared.coverage())
    with torch.no_grad():
        error = (model(batches[0]) - quantized(batches[0])).abs().max()
    print(f"largest difference from float: {float(error):.4f}")


if __name__ == "__main__":
    main()
