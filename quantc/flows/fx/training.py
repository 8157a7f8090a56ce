"""Training: the fake quantizers of QConfigs in the place of the engine's own."""

from __future__ import annotations

from torch import Tensor, nn

from quantc.flows.foreign_observers import ObservedBy, has_seen
from quantc.flows.fx.assign_qconfigs import rounds
from quantc.flows.fx.observers_in_graph import Makers
from quantc.ir.decisions import Quantize
from quantc.ir.program import TRAINED, Program
from quantc.qat.fake import FakeQuantizer, HandedOn
from quantc.spec.formats import Timing
from quantc.spec.numerics import QParams
from quantc.spec.spec import QuantSpec


class ByFakeQuantize(FakeQuantizer):
    """A fake quantizer that a QConfig has made: it rounds, and finds its scale, as it does anywhere."""

    def __init__(self, group: str, spec: QuantSpec, where: str, module: nn.Module) -> None:
        super().__init__(group, spec, where)
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        made: Tensor = self.module(x)
        return made

    def find(self, x: Tensor) -> QParams:
        return self.trained()

    @property
    def trained_by_data(self) -> bool:
        return True

    def trained(self) -> QParams:
        return ObservedBy(self.module, self.spec.granularity).qparams(self.spec, where=self.where)

    def why_unfit(self) -> str | None:
        return None if has_seen(self.module) else "no batch has gone through it"


def put_fake_quantizers(program: Program, makers: Makers) -> dict[str, list[str]]:
    """Put what QConfigs make in the place of the engine's fake quantizers. Gives their names by group."""
    holder = program.root.get_submodule(TRAINED)
    groups = {group.name: group for group in program.plan.groups}
    made: dict[str, FakeQuantizer] = {}
    names: dict[str, list[str]] = {}
    for name, fake in list(holder._modules.items()):
        if not isinstance(fake, FakeQuantizer):
            continue
        group = groups[fake.group]
        module = makers.observer(group) if isinstance(group.outcome, Quantize) else None
        if module is None or group.outcome.spec.timing is not Timing.STATIC or not rounds(module):  # type: ignore[union-attr]
            continue
        own = made.setdefault(fake.group, ByFakeQuantize(fake.group, fake.spec, fake.where, module))
        holder._modules[name] = own
        names.setdefault(fake.group, []).append(f"{TRAINED}.{name}.module")
    for name, handed in list(holder._modules.items()):
        # what is handed on is shown to the observer once more, as it is in calibration
        group_name = handed.__dict__["fake"].group if isinstance(handed, HandedOn) else ""
        if group_name in made:
            holder._modules[name] = made[group_name]
    program.touch()
    return names
