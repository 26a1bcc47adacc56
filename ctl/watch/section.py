"""A section of the code: what the main thread is at, as the watchdog sees it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ctl.errors import CtlError


@dataclasses.dataclass(eq=False)
class Section:
    """What the main thread is at.

    Attributes:
        doing: for people.
        limit: seconds without progress after which the process ends; None: it waits for nobody.
        otherwise: the error to end with then, instead of blaming the others.
        step: global step finished, when last looked.
        progress: reads the global step.
        marks: reads the marks of the running step: seconds since each that has fired, and the names
            of those that have not, in order.
        packs: bytes of each pack of gradients, where known.
        flag: the flag that sets the limit.
        stalled: seconds since the last progress.
        quiet_until: it says nothing before ``stalled`` reaches this.
        fired, not_fired, phase: of the running step, while it is stalled.
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
