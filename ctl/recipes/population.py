"""A population of seeds: how much of a result is luck.

Trains the same flags with several seeds, one run after the other, and prints the results of each
run and their mean, standard deviation (of a sample: divided by n - 1) and range. The seed decides
the first weights, the order of the data, augmentation and Dropout. All flags of `ctl.train` apply;
``--seed`` is the first seed. With ``--model_dir`` the runs stay in ``seed-N`` there: the same
command then resumes, and with more ``--seeds`` trains those that are missing::

    python -m ctl.recipes.population --seeds=5 --model=dense --train_steps=200
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from absl import flags

import ctl
from ctl import UsageError

FLAGS = flags.FLAGS
flags.disclaim_key_flags()


def run() -> None:
    """The command line."""
    ctl.flags.training.define_flags(model_dir_required=False)
    with ctl.flags.group("Population"):
        flags.DEFINE_integer("seeds", 5, "Number of runs, each with its own seed.", lower_bound=2)
    ctl.flags.run_command(main, f"\n{__doc__}")


def main() -> None:
    """Trains the population, prints the table, or exits with the code of the run that failed."""
    if "://" in (FLAGS.model_dir or ""):
        raise UsageError("a population writes runs to a directory: --model_dir cannot be a URL")
    with tempfile.TemporaryDirectory() as scratch:
        results: dict[int, dict[str, float]] = {}
        for seed in range(FLAGS.seed, FLAGS.seed + FLAGS.seeds):
            print(f"seed {seed}: {len(results) + 1} of {FLAGS.seeds}", flush=True)
            results[seed] = trained(seed, Path(FLAGS.model_dir or scratch) / f"seed-{seed}")
    check_steps(results, FLAGS.early_stop)
    print("\n".join(table(results)))


def trained(seed: int, model_dir: Path) -> dict[str, float]:
    """Trains with ``seed`` in a process of its own. Returns the results of the last evaluation, and
    its ``step``."""
    others = [
        FLAGS[n] for n in FLAGS if FLAGS[n].present and n not in ("seed", "seeds", "model_dir")
    ]
    given = [flag.serialize() for flag in others]
    command = [sys.executable, "-m", "ctl.train", *given, f"--seed={seed}"]
    code = ctl.launch.launch([*command, f"--model_dir={model_dir}"], workers=1)
    if code:
        raise SystemExit(code)
    run = ctl.logs.runs.read(model_dir)
    for note in run.notes:
        print(note, file=sys.stderr)
    # A test comes after the evaluation of its step.
    last = [max(found.items()) for name in ("test", "eval") if (found := run.records.get(name))]
    if not last:
        raise UsageError(f"{model_dir}: metrics.jsonl has no evaluation: use another --model_dir")
    step, scalars = max(last, key=lambda item: item[0])
    return {"step": step, **scalars}


def check_steps(results: dict[int, dict[str, float]], early_stop: str | None) -> None:
    """Raises `UsageError` if runs without ``early_stop`` have ended at different steps."""
    steps = {seed: result["step"] for seed, result in results.items()}
    if len(set(steps.values())) > 1 and not early_stop:
        ends = ", ".join(f"seed {seed} at {step}" for seed, step in steps.items())
        raise UsageError(f"the runs ended at different steps: {ends}; use another --model_dir")


def table(results: dict[int, dict[str, float]]) -> list[str]:
    """The lines of a table: results by seed, and the statistics of each. It has the steps if they
    differ, and names what only some seeds have."""
    import numpy as np

    found = dict.fromkeys(name for result in results.values() for name in result)
    names = [name for name in found if all(name in result for result in results.values())]
    missing = [name for name in found if name not in names]
    if len({result["step"] for result in results.values()}) == 1:
        names.remove("step")
    columns = [[result[name] for result in results.values()] for name in names]

    def row(title: object, values: Iterable[float]) -> str:
        return f"{title:<10}" + "".join(f"{value:>14.6g}" for value in values)

    rows = [row(seed, [result[name] for name in names]) for seed, result in results.items()]
    rows.append(row("mean", np.mean(columns, axis=1)))
    rows.append(row("deviation", np.std(columns, axis=1, ddof=1)))
    rows.append(row("least", np.min(columns, axis=1)))
    rows.append(row("most", np.max(columns, axis=1)))
    if missing:
        rows.append(f"missing for some seeds: {', '.join(missing)}")
    return [f"{'seed':<10}" + "".join(f"{name:>14}" for name in names), *rows]


if __name__ == "__main__":
    run()
