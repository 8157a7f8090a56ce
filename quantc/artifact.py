"""What a deployed file says of where it comes from."""

from __future__ import annotations

from hashlib import sha256
from importlib.metadata import version

from quantc.errors import QuantcError
from quantc.program import Program, Stage


def metadata(program: Program) -> dict[str, str]:
    """Which quantc made it, for which backend, by which config, and of what: digests, so that two files can be told apart."""
    plan = program.plan
    config = "" if plan.config is None else plan.config.model_dump_json()
    return {
        "quantc.version": version("quantc"),
        "quantc.program": program.name,
        "quantc.backend": "" if plan.quantizer is None else plan.quantizer.name,
        "quantc.config": _digest(config),
        "quantc.source": _digest(program.dump("text")),
    }


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def check_quantized(program: Program, target: str) -> None:
    """Refuse what is not in Q/DQ form: float programs, and those in integer form."""
    if program.stage < Stage.FOLDED:
        raise QuantcError(
            f"{program.name} is not quantized",
            where=f"its stage is {program.stage.label}",
            advice="call qc.convert(prepared) first, or qc.quantize",
        )
    if program.stage >= Stage.LOWERED:
        raise QuantcError(
            f"{program.name} is in integer form, and {target} is written from the Q/DQ form",
            where=f"its stage is {program.stage.label}",
            advice='give what qc.convert(prepared) gives, without to="integer"',
        )
