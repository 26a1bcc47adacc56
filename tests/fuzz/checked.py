"""Is `ctl.testing.check_step` right about steps that are right, and about mistakes?

It must accept the methods of tests/support/right_steps.py under the drawn options, and find the
mistakes of wrong_steps.py, alone or in such a method, by the words that are expected there.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf
from _pytest.outcomes import Failed  # of `pytest.raises`, if nothing is
from helpers import examples
from right_steps import COUNT, RIGHT, check_right, maker
from wrong_steps import check_wrong, composed, wrong

from .cases import BATCH, RIGHT_STEPS, Case

_OPTIONS = ("accumulate_steps", "clip_norm", "ema_decay", "loss_scale", "on_nan", "bytes_per_pack")

# Methods and options that must be refused, and what the error says.
_REFUSED = {
    ("fedavg", "loss_scale"): "depends on the loss scale: FedAvg must compute gradients with",
    ("pcgrad", "accumulate_steps"): "accumulate_steps=. has no effect: PCGrad.forward_backward",
}


def verdict(case: Case) -> tuple[str, str]:
    """Returns kind and text of the `Verdict` on what `check_step` says."""
    options = {name: getattr(case, name) for name in _OPTIONS if _is_drawn(case, name)}
    options |= {"jit_update": case.jit_update}  # by default, it is compiled, which takes a second
    mistake, _, method = case.checked.partition(" in ")
    expected = _refusal(case)
    try:
        if mistake in RIGHT_STEPS:
            kind, arrays, own = RIGHT[mistake]
            data = arrays if case.source == "memory" else _batched(arrays, case.sizes[0])
            check_right(maker(kind, data, **(own | options)), mistake, case.replicas, steps=2)
        elif method:
            check_wrong(composed(mistake, RIGHT[method], **options), mistake)
        else:
            check_wrong(wrong(mistake, **options), mistake)
    except (Exception, Failed) as error:  # noqa: BLE001
        text = " ".join(str(error).split())
        if expected and re.search(expected, text):
            return "refused", text
        return "bug", f"check_step: {type(error).__name__}: {text[:500]}"
    return ("bug", f"check_step accepts it; expected: {expected}") if expected else ("equal", "")


def _is_drawn(case: Case, option: str) -> bool:
    return getattr(case, option) != getattr(Case(), option)


def _refusal(case: Case) -> str:
    """What `check_step` must say of a step that is right; "" if it must accept it."""
    if case.checked in RIGHT_STEPS and case.source == "memory" and BATCH % case.replicas:
        return f"batch size {BATCH} is not divisible by {case.replicas} replicas"
    for (method, option), says in _REFUSED.items():
        if method == case.checked and _is_drawn(case, option):
            return says
    return ""


def _batched(arrays: Any, size: int) -> Any:
    """Makes batches whose size the step does not know when it is traced."""
    chosen = examples(COUNT) if arrays is None else arrays
    return lambda: tf.data.Dataset.from_tensor_slices(chosen).batch(size)
