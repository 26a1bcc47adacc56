"""Drawn trainings equal those of a plain loop; so do all that did not once."""

from __future__ import annotations

import contextlib
import functools

import pytest

from .cases import Case, drawn
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


@pytest.mark.slow
@pytest.mark.sample
def test_kept_cases():
    found = bugs(list(kept().values()))
    assert not found, "\n".join(found)
