"""A section of the code that the main thread is in, as the watchdog sees it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ctl.errors import CtlError


@dataclasses.dataclass(eq=False)
class Section:
    """The current work of the main thread.

    Attributes:
        doing: description for messages.
        limit: seconds without progress after which the process ends; None for work that waits for
            no other worker.
        otherwise: error to end with at the limit, in place of one that blames other workers.
        step: last known global step.
        progress: returns the global step.
        marks: returns the seconds since each mark of the running step that has fired, and the names
            of those that have not, in the order of the step.
        packs: bytes of each pack of gradients, where known.
        flag: the flag that sets the limit.
        stalled: seconds since the last progress.
        quiet_until: value of ``stalled`` at which the watchdog next logs whom it waits for.
        fired, not_fired: last result of ``marks``, read while the step makes no progress.
        phase: what the running step waits for, see `ctl.distributed.watch.record.phase_of`.
    """

    doing: str
    limit: float | None
    otherwise: CtlError | None = None
    step: int | None = None
    progress: Callable[[], int] | None = None
    marks: Callable[[], tuple[dict[str, float], tuple[str, ...]]] | None = None
    packs: tuple[int, ...] = ()
    flag: str = "--collective_timeout"
    stalled: float = 0.0
    quiet_until: float = math.inf
    fired: dict[str, float] = dataclasses.field(default_factory=dict)
    not_fired: tuple[str, ...] = ()
    phase: str = ""
