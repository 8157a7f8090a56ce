"""Provenance of a deployed file."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version

from quantc.errors import QuantcError
from quantc.ir.program import Program, Stage, check_has_plan
from quantc.text.digests import state_digest

VERSION = version("quantc")


@dataclass(frozen=True)
class Provenance:
    """The quantc version, backend, config and source of a file: digests, so that two files can be told apart."""

    quantc: str
    """The version."""
    program: str
    backend: str
    """The backend it was quantized for; empty if it was quantized elsewhere."""
    config: str
    """Digest of the user's config."""
    source: str
    """A digest of the quantized program: of its text and of its tensors. The same in whatever form it is deployed."""

    @staticmethod
    def of(program: Program) -> Provenance:
        plan = program.plan
        return Provenance(
            quantc=VERSION,
            program=program.name,
            backend="" if plan.quantizer is None else plan.quantizer.name,
            config=_digest("" if plan.config is None else plan.config.model_dump_json()),
            source=_digest(program.dump("text", plan=False), state_digest(program.root) or ""),
        )


def _digest(*texts: str) -> str:
    total = sha256()
    for text in texts:
        total.update(text.encode())
        total.update(b"\0")
    return total.hexdigest()


def check_converted(program: Program) -> None:
    """Refuse float programs, and those that were prepared alone."""
    if program.stage < Stage.FOLDED:
        raise QuantcError(
            f"{program.name} is not quantized",
            where=f"its stage is {program.stage.label}",
            advice="call qc.convert(prepared) first, or qc.quantize",
        )
    check_has_plan(program, "lower")


def check_quantized(program: Program, target: str) -> None:
    """Refuse programs that are not in Q/DQ form: float programs, and those in integer form."""
    check_converted(program)
    if program.stage >= Stage.LOWERED:
        raise QuantcError(
            f"{program.name} is in integer form, and {target} is written from the Q/DQ form",
            where=f"its stage is {program.stage.label}",
            advice='give what qc.convert(prepared) gives, without to="integer"',
        )
