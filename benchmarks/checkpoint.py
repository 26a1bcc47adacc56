"""How long does a loop stand still for a save, and when is the checkpoint on the disk?

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --megabytes=100 --variables=20 --json=out.json

Compares `ctl.CheckpointManager` with `tf.train.CheckpointManager`, whose `save` is synchronous.
Both save the same state in the same process (`peers/checkpoint_saver.py`), in turns, while a loop
updates all of the state at every step. README.md says how the numbers are derived.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from typing import Any

from absl import flags
from processes import Peer, machine, progress, summary, write

from ctl.errors import UsageError
from ctl.flags.parsing import group, run_command

_WHO = ("ctl", "tf")
_TIMES = ("stands_still", "delay", "durable", "restored")

with group("What is saved"):
    _MEGABYTES = flags.DEFINE_list("megabytes", "1,100,500", "sizes of the state, in 10^6 bytes")
    _VARIABLES = flags.DEFINE_list("variables", "20,300", "variables that it is made of")
    _DIRECTORY = flags.DEFINE_string("directory", None, "where; a temporary one by default")
with group("How"):
    _ROUNDS = flags.DEFINE_integer(
        "rounds", 9, "saves of each, after a first one that is shown separately", lower_bound=1
    )
    _TIMEOUT = flags.DEFINE_float("timeout", 300.0, "seconds for one save and restore")
    _JSON = flags.DEFINE_string("json", None, "file for the results")


def measure(megabytes: str, variables: str) -> dict[str, Any]:
    """Returns ``{"rounds": [{who: {time: seconds}}, ...], ...}``. The first round has the first
    saves of the process."""
    where = f"{megabytes} MB in {variables} variables"
    sizes = [f"--megabytes={megabytes}", f"--variables={variables}"]
    with (
        tempfile.TemporaryDirectory(dir=_DIRECTORY.value) as directory,
        Peer(where, ["checkpoint_saver.py", *sizes, f"--directory={directory}"]) as peer,
    ):
        about = peer.answer(_TIMEOUT.value)
        rounds = []
        for number in range(1 + _ROUNDS.value):
            progress(f"{where}: {number}/{_ROUNDS.value}")
            row = {}
            for who in _WHO if number % 2 == 0 else reversed(_WHO):  # neither always goes first
                row[who] = peer.ask(_TIMEOUT.value, who=who)
            rounds.append(row)
    progress("")
    return {"megabytes": float(megabytes), "variables": int(variables), **about, "rounds": rounds}


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Adds the time of the first saves, the seconds of the later ones, and the ratios of ctl to
    TensorFlow."""
    first, *later = result["rounds"]
    return result | {
        "first": {who: first[who]["stands_still"] for who in _WHO},
        "seconds": {who: {t: summary([r[who][t] for r in later]) for t in _TIMES} for who in _WHO},
        "ratio": {t: summary([r["ctl"][t] / r["tf"][t] for r in later]) for t in _TIMES},
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['megabytes']:g} MB in {result['variables']} variables")
    titles = ("first save", "stands still", "delay", "durable", "restored")
    print(f"{'':8}" + "".join(f"{title:>20}" for title in titles))
    for who in _WHO:
        cells = [f"{1e3 * result['first'][who]:.1f} ms"]
        cells += [f"{1e3 * result['seconds'][who][t]['median']:.1f} ms" for t in _TIMES]
        print(f"{who:8}" + "".join(f"{cell:>20}" for cell in cells))
    cells = [f"{result['first']['ctl'] / result['first']['tf']:.2f}"]
    for of in (result["ratio"][t] for t in _TIMES):
        cells.append(f"{of['median']:.2f} ({of['min']:.2f}-{of['max']:.2f})")
    print(f"{'ratio':8}" + "".join(f"{cell:>20}" for cell in cells), end="\n\n")


def main() -> None:
    for flag, kind in ((_MEGABYTES, float), (_VARIABLES, int)):
        for value in flag.value:
            try:
                valid = 0 < kind(value) < float("inf")
            except ValueError:
                valid = False
            if not valid:
                raise UsageError(f"--{flag.name}={value}: must be a positive number")
    about = machine(os.getloadavg()[0])
    print("  ".join(f"{key}={value}" for key, value in about.items()), end="\n\n")
    results = []
    for megabytes, variables in itertools.product(_MEGABYTES.value, _VARIABLES.value):
        results.append(summarize(measure(megabytes, variables)))
        show(results[-1])
        write(_JSON.value, {"machine": about, "results": results})


if __name__ == "__main__":
    run_command(main, __doc__)
