"""Runs actions between two calls of a loop, each with a `Status`."""

from __future__ import annotations

from collections.abc import Sequence

from ctl.base.actions import NEVER, Action, Status
from ctl.control.scalars import Scalars
from ctl.data.dataset import Dataset
from ctl.distributed.watch import watchdog


def steps_until_due(actions: Sequence[Action], step: int) -> int:
    """Number of steps until the next of ``actions`` is due; `NEVER` if none is."""
    due = [a.steps_until_due(step) for a in actions if hasattr(a, "steps_until_due")]
    return min(due, default=NEVER)


def status_of(
    step: int, until: int, seconds_per_step: float, dataset: Dataset, window: Scalars
) -> Status:
    """Returns the status at ``step``. Its scalars are read once, when an action asks for them."""
    read: dict[str, float] = {}

    def scalars() -> dict[str, float]:
        if not read:
            read.update(window.read())
        return dict(read)

    def reset() -> None:
        scalars()  # keeps them for actions that read them later
        window.reset()

    examples, batch = dataset.num_examples, dataset.global_batch_size
    return Status(
        step=step,
        until=until,
        steps_per_epoch=examples / batch if examples and batch else None,
        seconds_per_step=seconds_per_step,
        final=step >= until,
        scalars=scalars,
        reset=reset,
    )


def run_actions(actions: Sequence[Action], status: Status) -> None:
    """Calls each of ``actions``. With several workers, the watchdog names an action that hangs."""
    for action in actions:
        name = type(getattr(action, "action", action)).__name__  # an `Every` holds the action
        with watchdog.host(f"the action {name}", status.step):
            action(status)
