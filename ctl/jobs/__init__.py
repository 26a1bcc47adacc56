"""Makes a run from flags: model, data, step, loop, and what it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base.lazy import load_lazily

if TYPE_CHECKING:
    from ctl.jobs.build import make_loop, prepare

__all__ = ["make_loop", "prepare"]

__getattr__, __dir__ = load_lazily(__name__, __all__, dict.fromkeys(__all__, "ctl.jobs.build"))
