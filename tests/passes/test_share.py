"""share: sites of one scale are one group, and running it again finds the same."""

from __future__ import annotations

from quantc.annotate.quantizer import quantizer_of
from quantc.ir.decisions import Quantize
from quantc.ir.program import Program
from quantc.passes.annotate import Annotate
from quantc.passes.share import Share
from quantc.spec.spec import UINT8
from tests.support.small_backend import SMALL
from tests.support.text_programs import program_of

POOLED = """program "Pooled" stage=canonical method=export mode=eval
  input %x : f32[1,2,4,4]
  const %w = "w" : f32[2,2,1,1] buffer
  const %v = "v" : f32[3,8] buffer
  %conv : f32[1,2,4,4] = conv2d(%x, %w)
  %pool : f32[1,2,2,2] = max_pool2d(%conv, [2, 2])
  %flat : f32[1,8] = flatten(%pool, 1)
  %head : f32[1,3] = linear(%flat, %v)
  output (%head,)
"""


def annotated(text: str) -> Program:
    program = program_of(text)
    Annotate(backend=quantizer_of(SMALL)).run(program)
    return program


def groups(program: Program) -> list[set[str]]:
    return [{str(site) for site in group.places} for group in program.plan.groups]


def test_what_is_only_moved_is_in_the_group_of_what_it_was() -> None:
    program = annotated(POOLED)
    outcome = Share().run(program)
    assert outcome.changed
    assert outcome.notes == ("5 groups",)
    assert {"pool:in0", "pool:out0", "flat:in0", "flat:out0", "head:in0"} in groups(program)
    assert [len(group) for group in groups(program)].count(1) == 4


def test_every_quantized_site_is_in_one_group() -> None:
    program = annotated(POOLED)
    Share().run(program)
    placed = [str(site) for group in program.plan.groups for site in group.places]
    assert sorted(placed) == sorted(str(site) for site in program.plan.outcomes)


def test_a_second_time_nothing_changes() -> None:
    program = annotated(POOLED)
    Share().run(program)
    before = program.plan.groups
    assert not Share().run(program)
    assert program.plan.groups == before


def test_groups_follow_a_plan_that_changed() -> None:
    program = annotated(POOLED)
    Share().run(program)
    site = next(site for site in program.plan.outcomes if str(site) == "head:in0")
    program.plan.outcomes[site] = Quantize(UINT8.but(qmax=127))
    outcome = Share().run(program)
    assert outcome.changed
    assert outcome.notes == ("6 groups",)
    assert {"head:in0"} in groups(program), "it wants another form than the pool hands on"


def test_the_order_of_annotation_does_not_matter() -> None:
    program, turned = annotated(POOLED), annotated(POOLED)
    rows = list(turned.plan.outcomes.items())
    for site, _ in rows:
        del turned.plan.outcomes[site]
    for site, outcome in reversed(rows):
        turned.plan.outcomes[site] = outcome
    for each in (program, turned):
        Share().run(each)
    assert sorted(map(sorted, groups(program))) == sorted(map(sorted, groups(turned)))


def test_nothing_quantized_is_nothing_shared() -> None:
    program = program_of(POOLED)
    outcome = Share().run(program)
    assert not outcome.changed
    assert outcome.notes == ()
