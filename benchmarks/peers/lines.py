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


def serve(about: dict[str, Any], reply: Callable[..., dict[str, Any]], answer: Callable) -> None:
    """Answers ``about``, then ``reply(**request)`` to each request until stdin ends."""
    answer(**about)
    for line in sys.stdin:
        answer(**reply(**json.loads(line)))
