"""The model zoo: small models in plain torch that between them use every construct capture has to get right."""

from __future__ import annotations

from tests.zoo import convs, inplace, norms, recurrent, spellings, state, structure, transformers, vision
from tests.zoo.case import BATCH, Case, detached

CASES: tuple[Case, ...] = (
    *vision.CASES,
    *transformers.CASES,
    *recurrent.CASES,
    *convs.CASES,
    *structure.CASES,
    *inplace.CASES,
    *spellings.CASES,
    *norms.CASES,
    *state.CASES,
)

BY_NAME: dict[str, Case] = {case.name: case for case in CASES}


def tagged(tag: str) -> tuple[Case, ...]:
    """The cases with a tag: "cnn", "attention", "inplace", "train", and so on."""
    return tuple(case for case in CASES if tag in case.tags)


__all__ = ["BATCH", "BY_NAME", "CASES", "Case", "detached", "tagged"]
