"""What happens when Python wakes between two calls of a loop: actions see a `Status`."""

from __future__ import annotations

from collections.abc import Sequence

from ctl.actions import NEVER, Action, Status
from ctl.data.dataset import Dataset
from ctl.logs.scalars import Scalars
from ctl.watch import watchdog


def steps_until_due(actions: Sequence[Action], step: int) -> int:
    """After how many steps the next of ``actions`` is due."""
    due = [a.steps_until_due(step) for a in actions if hasattr(a, "steps_until_due")]
    return min(due, default=NEVER)


def status_of(
    step: int, until: int, seconds_per_step: float, dataset: Dataset, window: Scalars
) -> Status:
    """The status at ``step``. Its scalars are read once, when an action asks for them."""
    read: dict[str, float] = {}

    def scalars() -> dict[str, float]:
        if not read:
            read.update(window.read())
        return dict(read)

    def reset() -> None:
        scalars()  # for actions that read after this one
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
    """Calls each of ``actions``; of several workers, one that hangs is named."""
    for action in actions:
        name = type(getattr(action, "action", action)).__name__  # what an `Every` calls
        with watchdog.host(f"the action {name}", status.step):
            action(status)
