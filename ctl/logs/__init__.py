"""Output of a run: terminal, progress bar, metrics, profiles, pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctl.base.lazy import load_lazily

if TYPE_CHECKING:
    from ctl.base import console, svg
    from ctl.logs import runs
    from ctl.logs.ledger import LedgerFile
    from ctl.logs.sinks import JsonLines, TensorBoard

__all__ = ["JsonLines", "LedgerFile", "TensorBoard", "console", "runs", "svg"]

__getattr__, __dir__ = load_lazily(
    __name__,
    __all__,
    {
        "JsonLines": "ctl.logs.sinks",
        "LedgerFile": "ctl.logs.ledger",
        "TensorBoard": "ctl.logs.sinks",
        "console": "ctl.base.console",
        "svg": "ctl.base.svg",
    },
)
