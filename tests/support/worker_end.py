"""How the program of a worker ends after an error of ctl: one line, and its exit code at once. A
collective that the watchdog would not end is an error, too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from unwatched import collectives_refused

from ctl.errors import CtlError


def run_to_end(main: Callable[[], None]) -> None:
    """Calls ``main``."""
    try:
        with collectives_refused():
            main()
    except CtlError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)
