"""The only place that turns a `Timeline` into tables, and prints them on the terminal.

The page shows the same tables (`ctl.inspect.page`). Many replicas are told in a bounded number of
rows: the spread, and those that make the others wait.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ctl import svg
from ctl.inspect.charts import PHASES, significant

if TYPE_CHECKING:
    from ctl.inspect.plan import Plan
    from ctl.inspect.timeline import Timeline

REPLICAS = 12  # Rows of a table; more are summarised.
PACKS = 16
WORST = 5  # Named one by one where the rest is summarised.


@dataclass(frozen=True)
class Table:
    """A table as text. ``rows`` are the cells from left to right, the first is the row's name; the
    rows whose number is in ``strong`` are to be seen first."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()
