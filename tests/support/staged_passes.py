"""Passes that do nothing and stand at different stages, for tests of pipelines and their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Pass
from quantc.pipeline.registry import PASSES, PIPELINES, register_pass


class Options(Pass):
    """Has options and does nothing."""

    name: ClassVar[str] = "test-options"
    needs: ClassVar[Stage] = Stage.CAPTURED

    count: int = 0
    is_on: bool = False

    def run(self, program: Program) -> bool:
        return False


class Step(Pass):
    """Does nothing; its subclasses stand at different stages."""

    name: ClassVar[str] = "test-step"
    needs: ClassVar[Stage] = Stage.CAPTURED

    def run(self, program: Program) -> bool:
        return False


class Tidy(Step):
    name: ClassVar[str] = "test-tidy"
    gives: ClassVar[Stage | None] = Stage.CANONICAL


class Join(Step):
    name: ClassVar[str] = "test-join"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    gives: ClassVar[Stage | None] = Stage.FUSED


class Mark(Step):
    name: ClassVar[str] = "test-mark"
    needs: ClassVar[Stage] = Stage.CANONICAL
    gives: ClassVar[Stage | None] = Stage.ANNOTATED


class Share(Step):
    name: ClassVar[str] = "test-share"
    needs: ClassVar[Stage] = Stage.ANNOTATED
    gives: ClassVar[Stage | None] = Stage.SHARED


STAGED: tuple[type[Pass], ...] = (Options, Step, Tidy, Join, Mark, Share)


@contextmanager
def staged() -> Iterator[None]:
    """With these passes registered, and nothing registered afterwards."""
    for kind in STAGED:
        register_pass(kind)
    yield
    PASSES.session.clear()
    PIPELINES.session.clear()
