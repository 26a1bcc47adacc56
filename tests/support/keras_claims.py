"""What Keras does of what README.md says, a line of JSON for each name of a claim.

In a process of its own: the pipelines of `fit` have autotuning, and whoever frees one now and then
waits for most of a minute (`ctl.data.dataset.distribution_options`).

python keras_claims.py NAME …
"""

from __future__ import annotations

import json
import os
import sys

from paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS / "peers"))

from claims import CLAIMS  # noqa: E402
from ctl_fixtures import mirrored_strategy  # noqa: E402


def run() -> None:
    for name in sys.argv[1:]:
        seen = CLAIMS[name].keras(mirrored_strategy(2))
        print(json.dumps({"name": name, **seen._asdict()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    run()
