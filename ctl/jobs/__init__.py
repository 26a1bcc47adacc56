"""Makes a run from flags: model, data, step, loop, and what it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base.lazy import load_lazily

if TYPE_CHECKING:
    from ctl.jobs.build import make_loop, prepare
    from ctl.jobs.parameter_server import CopyEvaluator, ParameterServerLoop, serve

__all__ = ["CopyEvaluator", "ParameterServerLoop", "make_loop", "prepare", "serve"]

__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        **dict.fromkeys(("make_loop", "prepare"), "ctl.jobs.build"),
        **dict.fromkeys(
            ("CopyEvaluator", "ParameterServerLoop", "serve"), "ctl.jobs.parameter_server"
        ),
    },
)
