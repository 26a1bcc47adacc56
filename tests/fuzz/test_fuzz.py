"""Drawn trainings equal those of a plain loop; so do all that did not once."""

from __future__ import annotations

import contextlib
import functools

import pytest
import right_steps
import wrong_steps

from .cases import COMPOSED, MISTAKES, NOT_COMPOSED, RIGHT_STEPS, Case, drawn
from .run import judged, kept

CASES, PARTS = 54, 3


@functools.cache
def all_drawn() -> list[Case]:
    return drawn(CASES, number=0)


def bugs(chosen: list[Case]) -> list[str]:
    with contextlib.closing(judged(chosen, jobs=1)) as results:
        return [f"{case}\n  {text}" for case, kind, text in results if kind == "bug"]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_cases(part):
    """The same 54 in every run. To draw others: ``python -m tests.fuzz.run``.

    In parts with one child process each, so that pytest-xdist can share them out.
    """
    found = bugs(all_drawn()[part::PARTS])
    assert not found, "\n".join(found)


def test_every_step_is_drawn():
    assert RIGHT_STEPS.keys() == right_steps.RIGHT.keys()
    assert {*MISTAKES} == wrong_steps.WRONG.keys()
    assert COMPOSED == wrong_steps.COMPOSED
    assert {*right_steps.NOT_COMPOSED, "muon"} == NOT_COMPOSED


@pytest.mark.slow
@pytest.mark.sample
def test_kept_cases():
    found = bugs(list(kept().values()))
    assert not found, "\n".join(found)
