"""ctl.control.flight: which marks of the running step have fired, by the last stamps of all."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import make_loop

from ctl.control.flight import attach_progress_marks, fired
from ctl.distributed.watch.record import phase_of
from ctl.phases.marks import Marks
from ctl.phases.observer import NO_OBSERVER, Observer

NAMES = ("input", "forward", "backward", "ready0", "done0", "apply")


def stamps(*now: float) -> np.ndarray:
    """Of a step of which the first marks have fired."""
    return np.array([[*now, *[np.nan] * (len(NAMES) - len(now))]])


@pytest.mark.parametrize(
    ("seen", "phase"),
    [
        (stamps(), "input"),
        (stamps(11.0), "forward"),
        (stamps(11.1, 11.0), "backward"),  # the order of stamps means nothing
        (stamps(11.0, 11.1, 11.2, 11.3), "pack0"),
        (stamps(11.0, 11.1, 11.2, 11.3, 11.4), "apply"),
        (stamps(11.0, 11.1, 11.2, 11.3, 11.4, 11.5), ""),
    ],
)
def test_where_in_its_step_a_worker_is(seen, phase):
    ages, waiting = fired(NAMES, seen, now=12.0)
    assert phase_of(ages, waiting) == phase
    assert set(ages) | set(waiting) == set(NAMES)
    assert all(0.4 < age < 1.1 for age in ages.values())


def test_the_replica_that_is_behind_counts():
    ages, waiting = fired(
        NAMES, np.concatenate([stamps(11.0, 11.1, 11.2, 11.3), stamps(11.0, 11.5)]), now=12.0
    )
    assert ages == {"input": 1.0, "forward": 0.5} and waiting[0] == "backward"


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
    first = step.observer
    assert attach_progress_marks(step) and step.observer is not first  # for other packs
