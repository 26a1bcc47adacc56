"""How a peer answers: with one line of JSON on stdout for each line on stdin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answerer() -> Callable[..., None]:
    """Returns ``answer(**values)``, which prints a line of JSON on stdout. All other output of this
    process goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    return answer


def serve(build: Callable[[], tuple[dict[str, Any], Callable[..., dict[str, Any]] | None]]) -> None:
    """Answers requests until stdin ends.

    Args:
        build: returns the first answer, which says what was built, and the function that answers a
            request; None if there is none, since something is missing.
    """
    answer = answerer()
    about, reply = build()
    answer(**about)
    for line in sys.stdin if reply else ():
        answer(**reply(**json.loads(line)))
