"""The only place that defines command line flags, in groups that the commands share.

Imports no TensorFlow, so that ``--help`` and a wrong flag answer at once. A command calls the
groups it needs and then `run`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from ctl import rates
from ctl.errors import CtlError, UsageError
from ctl.names import SCALING_RULES, SCHEDULES

flags.disclaim_key_flags()  # They belong to the command that calls a group, and show in its --help.


def run(main: Callable[[], None]) -> None:
    """Parses the command line, calls ``main`` and exits.

    ``--help`` exits with 0. A wrong flag is one line on stderr and exit code 2; a `CtlError` is one
    line and its exit code.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            positional = flags.FLAGS(argv)[1:]
        except SystemExit as shown:  # --help, after which absl exits with 1.
            raise SystemExit(0) from shown
        except flags.Error as error:
            _fail(str(error), UsageError.exit_code)
        if positional:
            _fail(f"unexpected argument {positional[0]!r}: see --help", UsageError.exit_code)
        return argv[:1]

    def call(_: Sequence[str]) -> None:
        try:
            main()
        except CtlError as error:
            _fail(str(error), error.exit_code)

    app.run(call, flags_parser=parse)


def _fail(message: str, exit_code: int) -> None:
    print(" ".join(message.split()), file=sys.stderr)
    raise SystemExit(exit_code)


def check_flags(
    names: Sequence[str], check: Callable[..., None], values: flags.FlagValues = flags.FLAGS
) -> None:
    """Calls ``check`` with the flags ``names`` as keywords after parsing and after every change.

    A `UsageError` becomes the error of the command line, with its one line as it is: absl would put
    all flags and their values before it.
    """

    def checker(flag_values: dict[str, Any]) -> bool:
        try:
            check(**flag_values)
        except UsageError as error:
            raise flags.IllegalFlagValueError(str(error)) from error
        return True

    flags.register_multi_flags_validator(names, checker, flag_values=values)


def define_schedule_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """The learning rate as a function of the step: `ctl.schedule.make_schedule`."""
    flags.DEFINE_enum(
        "schedule", "constant", SCHEDULES, "Learning rate schedule.", flag_values=values
    )
    flags.DEFINE_float(
        "learning_rate",
        None,
        "Learning rate, at its highest (default: 1e-3). Not for --schedule=piecewise.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "boundaries",
        None,
        "Piecewise: where the next of --rates begins, in steps (500) or epochs counted from 0 "
        "(3ep,7ep: before epoch 3, before epoch 7, after) (default: none).",
        flag_values=values,
    )
    flags.DEFINE_list(
        "rates",
        None,
        "Piecewise: the learning rates, one more than --boundaries (1e-3,1e-4,1e-5).",
        flag_values=values,
    )
    flags.DEFINE_string(
        "warmup",
        "0",
        "Linear warm-up of any schedule, in steps (500) or epochs (0.5ep).",
        flag_values=values,
    )
    flags.DEFINE_float(
        "end_learning_rate",
        None,
        "Cosine, polynomial: learning rate at the end of the training (default: 0).",
        flag_values=values,
    )
    flags.DEFINE_float(
        "decay_rate",
        None,
        "Exponential: factor by which the rate changes every --decay_steps (default: 0.95).",
        flag_values=values,
    )
    flags.DEFINE_string(
        "decay_steps",
        None,
        "Exponential: steps (500) or epochs (2ep) per --decay_rate (default: 1ep).",
        flag_values=values,
    )
    flags.DEFINE_float(
        "power", None, "Polynomial: exponent (default: 1, a line).", flag_values=values
    )
    flags.DEFINE_enum(
        "lr_scaling",
        "none",
        SCALING_RULES,
        "Multiplies every rate by k = global batch size / --base_batch_size (linear), by the "
        "square root of k (sqrt) or not at all.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "base_batch_size",
        None,
        "Examples per update for which the rates were chosen; with --lr_scaling (default: 256).",
        flag_values=values,
    )

    check_flags(_SCHEDULE_FLAGS, _check_schedule, values)


_SCHEDULE_FLAGS = (
    "schedule",
    "learning_rate",
    "boundaries",
    "rates",
    "warmup",
    "end_learning_rate",
    "decay_rate",
    "decay_steps",
    "power",
    "lr_scaling",
    "base_batch_size",
)


def _check_schedule(
    schedule: str, warmup: str, lr_scaling: str, base_batch_size: int | None, **options: Any
) -> None:
    """What can be said before the data are known. Ends in what `ctl.schedule` says afterwards."""
    rates.check_unused(schedule, **options)
    rates.steps_from("--warmup", warmup, 1.0)
    for name in ("learning_rate", "end_learning_rate"):
        if options[name] is not None:
            rates.check_rate(f"--{name}", options[name])
    for name in ("decay_rate", "power"):
        if options[name] is not None:
            rates.check_positive(f"--{name}", options[name])
    if options["decay_steps"] is not None:
        rates.check_positive(
            "--decay_steps", rates.steps_from("--decay_steps", options["decay_steps"], _LONG_EPOCH)
        )
    if schedule == "piecewise":
        _check_pieces(options["boundaries"] or (), options["rates"])
    if base_batch_size is not None:
        rates.check_positive("--base_batch_size", base_batch_size)
        if lr_scaling == "none":
            raise UsageError("--base_batch_size has no effect without --lr_scaling=linear|sqrt")


_LONG_EPOCH = 1e6  # Steps, for checks that do not depend on the length of an epoch.


def _check_pieces(boundaries: Sequence[str], values: Sequence[str] | None) -> None:
    if values is None:
        raise UsageError("--schedule=piecewise needs --rates, e.g. --rates=1e-3,1e-4,1e-5")
    rates.rates_from("--rates", values)
    rates.check_pieces(boundaries, values)
    steps = [rates.steps_from("--boundaries", b, _LONG_EPOCH) for b in boundaries]
    if len({b.endswith("ep") for b in boundaries}) == 1:  # Else it takes the length of an epoch.
        rates.check_increasing(steps, boundaries)


def schedule_arguments(values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """The flags as arguments of `ctl.schedule.make_schedule`, all but ``total_steps``,
    ``steps_per_epoch`` and ``global_batch_size``, which the caller knows."""
    return {
        "name": values.schedule,
        "learning_rate": values.learning_rate,
        "warmup_steps": values.warmup,
        "boundaries": values.boundaries,
        "values": values.rates,
        "decay_rate": values.decay_rate,
        "decay_steps": values.decay_steps,
        "end_learning_rate": values.end_learning_rate,
        "power": values.power,
        "base_batch_size": values.base_batch_size,
        "scaling": values.lr_scaling,
    }
