"""Where the checkout is."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
BENCHMARKS = ROOT / "benchmarks"
