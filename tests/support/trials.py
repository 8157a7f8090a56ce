"""Single trials of the conformance kit: a model that a rule takes, for one check to look at."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from quantc.annotate.quantizer import Backend
from quantc.testing.rule_trial import Subject, Trial, trials_of
from tests.support.faulty_backends import FAULTY, GOOD, Faulty
from tests.support.faulty_techniques import TECHNIQUES

BY_NAME: dict[str, Faulty] = {faulty.name: faulty for faulty in (*FAULTY, *TECHNIQUES)}


def trials(backend: Backend, rule: str) -> tuple[Trial, ...]:
    """Those of the models made for a rule that it takes."""
    subject = Subject(replace(backend, table=backend.table.only(rule)))
    return trials_of(subject, subject.demanded.table[rule])


@cache
def good_trial(rule: str) -> Trial:
    """The first of a rule of the good backend."""
    return trials(GOOD, rule)[0]


def faulty_trial(name: str) -> Trial:
    """The first of the rule that a faulty backend has the fault in."""
    faulty = BY_NAME[name]
    return trials(faulty.backend, faulty.rule)[0]
