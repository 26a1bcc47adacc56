"""What a flag means that is not set, where another value of the flag means the same.

Such flags are None by default, because some combinations of flags refuse a value that is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ctl.base.names import NAMING, code_name, is_function_name

EPOCHS = 12.0
LOG_EVERY = 100  # steps, and at each evaluation
LEARNING_RATE = 1e-3
END_LEARNING_RATE = 0.0
POWER = 1.0
DECAY_RATE = 0.95
DECAY_STEPS = "1ep"
PLATEAU_METRIC = "loss"
PLATEAU_FACTOR = 0.1
PLATEAU_PATIENCE = 10  # evaluations
BASE_BATCH_SIZE = 256
SYNTHETIC_SHAPE = (28, 28, 1)
# Of dlrm: those of its authors for the Kaggle data, but for the rows.
TABLE_ROWS = 10_000
EMBEDDING_DIM = 16
BOTTOM_UNITS = (512, 256, 64)
TOP_UNITS = (512, 256)


def spelled_out(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of all flags by name, with the default in place of None, and the module in
    place of its file.

    None stays where it has no other spelling.
    """
    synthetic = flags.get("dataset") == "synthetic"
    defaults = {
        "epochs": EPOCHS if flags.get("train_steps") is None else None,
        "log_every": str(LOG_EVERY),
        "train_split": "train",
        "eval_split": "test",  # where there is none, it cannot be spelled out
        "image_shape": ",".join(map(str, SYNTHETIC_SHAPE)) if synthetic else None,
        "weight_decay": 0.004
        if flags.get("optimizer") in ("adamw", "muon")
        else 0.0,  # as in Keras
        "learning_rate": LEARNING_RATE,
        "end_learning_rate": END_LEARNING_RATE,
        "power": POWER,
        "decay_rate": PLATEAU_FACTOR if flags.get("schedule") == "plateau" else DECAY_RATE,
        "decay_steps": DECAY_STEPS,
        "plateau_metric": PLATEAU_METRIC,
        "plateau_patience": PLATEAU_PATIENCE,
        "base_batch_size": BASE_BATCH_SIZE,
    }
    values = {n: defaults.get(n) if value is None else value for n, value in flags.items()}
    for name in NAMING:
        if isinstance(value := values.get(name), str) and is_function_name(value):
            values[name] = "{0.module}:{0.attribute}".format(code_name(value))
    return values


def early_stop_parts(text: str) -> tuple[str, str, str | None]:
    """``"loss:5:min"`` as metric, patience and mode; None for a mode that is left out."""
    head, _, last = text.rpartition(":")
    text, mode = (head, last) if last in ("max", "min") else (text, None)
    metric, _, patience = text.rpartition(":")
    return metric, patience, mode
