"""ctl.control.flight: which marks of the running step have fired, by the last stamps of all."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import make_loop

from ctl.control.flight import attach_progress_marks, fired
from ctl.phases.marks import Marks
from ctl.phases.observer import NO_OBSERVER, Observer

NAMES = ("input", "forward", "backward", "ready0", "done0", "apply")


def stamps(*now: float) -> np.ndarray:
    """Of a step of which the first marks have fired."""
    return np.array([[*now, *[np.nan] * (len(NAMES) - len(now))]])


def test_the_replica_that_is_behind_counts():
    ages, waiting = fired(
        NAMES, np.concatenate([stamps(11.0, 11.1, 11.2, 11.3), stamps(11.0, 11.5)]), now=12.0
    )
    assert ages == {"input": 1.0, "forward": 0.5}
    assert waiting == ("backward", "ready0", "done0", "apply")


@pytest.mark.parametrize("seen", [[], [11.1, 11.0], [11.0, 11.1, 11.2, 11.3, 11.4, 11.5]], ids=len)
def test_a_mark_has_fired_or_not(seen):
    """In the order of the step, which need not be that of the stamps."""
    ages, waiting = fired(NAMES, stamps(*seen), now=12.0)
    assert ages == pytest.approx({n: 12 - s for n, s in zip(NAMES, seen, strict=False)})
    assert waiting == NAMES[len(seen) :]


def test_a_clock_that_was_set_back_gives_no_negative_age():
    ages, _ = fired(NAMES, stamps(11.0), now=10.0)
    assert ages == {"input": 0.0}


def test_an_observer_of_the_user_is_kept(mirrored, caplog):
    class Mine(Observer):
        pass

    step = make_loop(mirrored(2)).step
    step.observer = mine = Mine()
    assert attach_progress_marks(step) is None
    assert step.observer is mine
    assert "the step has an observer of its own" in caplog.text
    step.observer = NO_OBSERVER
    assert attach_progress_marks(step) and isinstance(step.observer, Marks)
    recorder, first = attach_progress_marks(step), step.observer
    assert attach_progress_marks(step) and step.observer is not first  # for other packs
    assert attach_progress_marks(step, recorder) is recorder and step.observer is first
