"""The bar chart of `step_time.py`: a group of bars for each setting, all on one scale of ratios.

    python benchmarks/bars.py dense.json convnet.json > step_time.svg

draws the files that `step_time.py --json` wrote.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from ctl.base.svg import document, line, rect, text, ticks

_WIDTH, _NAMES, _VALUES = 720, 150, 120  # pixels; columns for the names and for the times
_BAR, _GAP, _HEAD, _FOOT = 18, 6, 44, 46

# What a variant is, for the key below the bars; README.md says more.
_ABOUT = {
    "ctl": "ctl.Loop.train, with XLA where the rule of --jit_compile says so",
    "ctl_off": "ctl.Loop.train with --jit_compile=off",
    "ctl_xla": "ctl.Loop.train with --jit_compile=on",
    "fit": "Keras Model.fit, one step per execution",
    "fit_50": "Keras Model.fit, steps_per_execution=50",
    "orbit": "Orbit's Controller and StandardTrainer, 500 steps per loop",
    "plain": "the loop of the TensorFlow tutorials: tf.range over the steps in one tf.function",
    "plain_xla": "plain, the whole step compiled with XLA",
    "torch": "the PyTorch loop; DistributedDataParallel over gloo with several workers",
    "torch_compile": "torch, compiled with torch.compile",
    "fabric": "the PyTorch loop through Lightning Fabric",
    "bound": "plain on one batch that never changes: no input pipeline",
    "bound_xla": "bound, the whole step compiled with XLA",
}

_LIGHT = {
    "text.title": "font-size: 14px; font-weight: 600; fill: #1f2328",
    ".ours": "fill: #0969da",
    ".theirs": "fill: #afb8c1",
    ".bound": "fill: #dfe3e8",
    ".spread": "stroke: #59636e",
}
_DARK = {
    ".ours": "fill: #4493f8",
    ".theirs": "fill: #57606a",
    ".bound": "fill: #30363d",
    ".spread": "stroke: #9198a1",
}


def chart(runs: Sequence[dict[str, Any]]) -> str:
    """Draws the ``runs`` of a JSON file of `step_time.py` as SVG.

    A bar is the median ratio of a variant's time to that of the reference variant; its whisker goes
    from the least to the greatest ratio of a round. Below the bars is what the variants are.
    """
    measured = [r["ratio"] for run in runs for r in run["variants"].values() if "ratio" in r]
    # The medians set the scale: a whisker is cut, so that one slow round does not shorten all bars.
    limit = 1.15 * max(max(ratio["median"] for ratio in measured), 1.0)
    scale = (_WIDTH - _NAMES - _VALUES) / limit
    parts, y = [], 8.0
    for run in runs:
        setting = run["settings"]
        kind = "workers" if setting["workers"] > 1 else "replicas"
        parts.append(
            text(
                12,
                y + 18,
                f"{setting['model']}, {setting[kind]} {kind.removesuffix('s')}"
                f"{'s' if setting[kind] > 1 else ''}, global batch {setting['global_batch_size']}",
                "title",
            )
        )
        parts.append(text(_WIDTH - 12, y + 18, "ratio and ms per step", "y"))
        top = y + _HEAD - 14
        bottom = y + _HEAD + (_BAR + _GAP) * len(run["variants"])
        for tick in ticks(limit):
            x = _NAMES + tick * scale
            parts.append(line(x, top, x, bottom, "frame" if tick == 1 else "grid"))
            parts.append(text(x, bottom + 14, f"{tick:g}", "x"))
        axis = f"time of a step over that of {setting['reference']}: shorter is faster"
        parts.append(text((_NAMES + _WIDTH - _VALUES) / 2, bottom + 30, axis, "x"))
        y += _HEAD
        for variant, row in run["variants"].items():
            parts.append(text(_NAMES - 8, y + 13, variant, "y"))
            if "failure" in row:
                parts.append(text(_NAMES + 6, y + 13, "fails"))
            else:
                parts += _bar(variant, row, y, scale, limit)
            y += _BAR + _GAP
        y += _FOOT
    used = dict.fromkeys(variant for run in runs for variant in run["variants"])
    for variant in (variant for variant in _ABOUT if variant in used):
        parts.append(text(_NAMES - 8, y + 13, variant, "y"))
        parts.append(text(_NAMES, y + 13, _ABOUT[variant]))
        y += 17
    y += 10
    return document("ctl-bars", _WIDTH, y, parts, _LIGHT, _DARK)


def _bar(variant: str, row: dict[str, Any], y: float, scale: float, limit: float) -> list[str]:
    kind = "theirs"
    if variant.startswith("ctl"):
        kind = "ours"
    elif variant.startswith("bound"):
        kind = "bound"
    ratio, ms, middle = row["ratio"], row["milliseconds"]["median"], y + _BAR / 2
    ends = [_NAMES + min(value, limit) * scale for value in (ratio["min"], ratio["max"])]
    return [
        rect(_NAMES, y, ratio["median"] * scale, _BAR, kind),
        line(ends[0], middle, ends[1], middle, "spread"),
        text(_WIDTH - 84, y + 13, f"{ratio['median']:.2f}", "y"),
        text(_WIDTH - 12, y + 13, f"{ms:.{2 if ms < 100 else 0}f} ms", "y"),
    ]


if __name__ == "__main__":
    files = [json.loads(pathlib.Path(path).read_text()) for path in sys.argv[1:]]
    print(chart([run for of in files for run in of["runs"]]), end="")
