"""The flag ``--augment``: which operations change the images of a training, and how much."""

from __future__ import annotations

from typing import NamedTuple

from absl import flags

from ctl.base.names import check_name
from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, group

flags.disclaim_key_flags()  # They belong to the command that calls a group.

# What follows the name of an operation: for each argument its name, type, smallest and largest.
_ARGUMENTS: dict[str, tuple[tuple[str, type, float, float], ...]] = {
    "crop": (("PIXELS", int, 1, 1024),),
    "flip": (),
    "color": (("STRENGTH", float, 0, 1),),
    "randaugment": (("LAYERS", int, 1, 16), ("MAGNITUDE", int, 0, 30)),
    "mixup": (("ALPHA", float, 0.01, 100),),
    "cutmix": (("ALPHA", float, 0.01, 100),),
}


def define_augment_flag() -> None:
    """Defines ``--augment``, see `ctl.data.Augmented`."""
    with group("Augmentation"):
        flags.DEFINE_string(
            "augment",
            None,
            "Random changes of the training images, e.g. crop:4,flip or randaugment:2:9. "
            "crop:PIXELS pads with PIXELS zeros and crops; flip mirrors from right to left; "
            "color:STRENGTH changes brightness, contrast and saturation; "
            "randaugment:LAYERS:MAGNITUDE takes a magnitude of at most 30; mixup:ALPHA and "
            "cutmix:ALPHA mix each image and its label with another (default: none).",
        )
    check_flags(["augment"], lambda augment: augment is not None and parse(augment))


class Operation(NamedTuple):
    """A function of `ctl.data.augment`, and its arguments after the images and the seeds."""

    name: str
    arguments: tuple[float, ...]


def parse(text: str) -> tuple[Operation, ...]:
    """Parses ``"crop:4,flip,randaugment:2:9"``; `UsageError` for other text."""
    return tuple(_parse_one(part.strip()) for part in text.split(","))


def _parse_one(text: str) -> Operation:
    name, *given = text.split(":")
    check_name("operation of --augment", name, _ARGUMENTS)
    wanted = _ARGUMENTS[name]
    form = ":".join([name, *(argument for argument, *_ in wanted)])
    if len(given) != len(wanted):
        raise UsageError(f"--augment={text}: write {form}")
    return Operation(name, tuple(map(_number, given, wanted, [f"--augment={text}"] * len(given))))


def _number(text: str, wanted: tuple[str, type, float, float], flag: str) -> float:
    name, kind, least, most = wanted
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        numbers = "a whole number" if kind is int else "a number"
        raise UsageError(f"{flag}: {name} must be {numbers} from {least} to {most}")
    return value
