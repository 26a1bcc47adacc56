"""Ends a training early: saves the state after a signal, or names a worker that was lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ctl import share, workers
from ctl.control.signals import StopRequested
from ctl.data.explained import explained
from ctl.errors import Preempted

if TYPE_CHECKING:
    from ctl.loop import Loop


@contextlib.contextmanager
def ending_well(loop: Loop, doing: str) -> Iterator[None]:
    """Wraps training or evaluation and turns early ends into errors for the user.

    Args:
        loop: the loop that runs.
        doing: what it does, for messages.

    Raises:
        Preempted: a signal asked to stop; the state was saved.
        PeerError: a worker was lost.
        UsageError: a check in the graph failed, see `share.refusals`; or the data cannot be read,
            see `explained`.
    """
    datasets = [loop.dataset, *(loop.evaluator.datasets if loop.evaluator else ())]
    try:
        with (
            workers.naming_lost_peers(loop.strategy, doing, lambda: loop.global_step),
            explained(*datasets),
            share.refusals(),
        ):
            yield
    except StopRequested:
        step, name = loop.global_step, loop.signals.name
        if loop.checkpoints is None:
            raise Preempted(f"{name} at step {step}; nothing saved, no checkpoints") from None
        loop.save(wait=True)
        saved = loop.checkpoints.latest() if workers.is_chief(loop.strategy) else None
        raise Preempted(
            f"{name}: saved step {step} in {saved.path if saved else loop.checkpoints.directory}; "
            "the same command resumes"
        ) from None
