"""Options of a user's step: a keyword of its constructor, a flag and an attribute, in one line."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from ctl.base.foreign_names import refuse_argument_of_step
from ctl.base.names import OPTIMIZER_FLAGS
from ctl.errors import UsageError

_owners: dict[str, str] = {}  # the class that declared a flag, by name


def option(
    default: Any,
    help: str,
    *,
    type: type[bool | int | float | str] | None = None,
    choices: Sequence[str] = (),
    lower_bound: float | None = None,
    upper_bound: float | None = None,
    fixed: bool = False,
) -> Any:
    """Declares an option in the body of a subclass of `ctl.TrainStep` or `ctl.EvalStep`::

        class SAM(ctl.TrainStep):
            rho: float = ctl.option(0.05, "How far to move the weights.", lower_bound=0.0)

    The keyword in ``SAM(model, optimizer, rho=0.1)`` sets it, and so does the flag in
    ``--step=mine:SAM --rho=0.1``. ``super().__init__()`` assigns ``self.rho``: the keyword, or else
    the value of the flag, which may be the default.

    Args:
        default: a bool, int, float or str, or None.
        help: text of the flag in ``--help``.
        type: type of the value, if ``default`` is None.
        choices: the strings that are allowed.
        lower_bound: smallest value of a number.
        upper_bound: largest value of a number.
        fixed: whether only the constructor reads the value; a later change is then refused.

    Raises:
        TypeError: neither ``default`` nor ``type`` is one of these types.
    """
    kind = type or default.__class__
    bounds: Any = lower_bound, upper_bound
    if kind is bool:
        parser: Any = flags.BooleanParser()
    elif kind is int:
        parser = flags.IntegerParser(*bounds)
    elif kind is float:
        parser = flags.FloatParser(*bounds)
    elif kind is str:
        parser = flags.EnumParser(list(choices)) if choices else flags.ArgumentParser()
    else:
        raise TypeError(f"an option is a bool, int, float or str; {default!r} needs a type=")
    return _Option(default, help, parser, fixed)


class _Option(NamedTuple):
    """The declaration that `option` leaves in a class. Each instance has the value."""

    default: Any
    help: str
    parser: Any
    fixed: bool

    def define(self, name: str, owner: type) -> None:
        """Defines the flag ``name``. A class that is defined again, in a notebook, replaces it."""
        where = f"{owner.__module__}.{owner.__qualname__}"
        if name in flags.FLAGS and _owners.get(name) == where:
            delattr(flags.FLAGS, name)
        arguments = name, self.default, self.help
        if isinstance(self.parser, flags.BooleanParser):
            flag: Any = flags.BooleanFlag(*arguments)
        else:
            flag = flags.Flag(self.parser, flags.ArgumentSerializer(), *arguments)
        flags.DEFINE_flag(flag, module_name=owner.__module__)
        _owners[name] = where

    def checked(self, name: str, value: Any) -> Any:
        """Returns ``value`` in the type of the option. Raises `UsageError` if it has none."""
        if value is None and self.default is None:
            return None
        try:
            value = self.parser.parse(os.fspath(value) if isinstance(value, os.PathLike) else value)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{name}={value!r}: {error}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name}={value} must be a finite number")
        return value


def declare(kind: type) -> None:
    """Defines a flag for each option in the body of the class ``kind``.

    Raises:
        UsageError: a base class has an attribute or argument of that name; it is a flag of the
            optimizer; or ``kind`` has an attribute with the name of an option.
    """
    bases = kind.__mro__[1:-1]
    for name, value in vars(kind).items():
        if isinstance(value, _Option):
            if name in OPTIMIZER_FLAGS:
                raise UsageError(
                    f"{kind.__name__}.{name}: --{name} is a flag of the optimizer, which this "
                    "option would not set: rename the option"
                )
            for base in bases:
                made = vars(base).get("__init__")
                if name in vars(base) or (made and name in inspect.signature(made).parameters):
                    raise UsageError(
                        f"{kind.__name__}.{name}: {base.__name__} has {name!r}: rename the option"
                    )
            value.define(name, kind)
        elif any(isinstance(vars(base).get(name), _Option) for base in bases):
            raise UsageError(f"{kind.__name__}.{name} hides an option: give --{name} or {name}=")
    for base in bases:  # mixins that are not steps
        for name, value in vars(base).items():
            if isinstance(value, _Option) and name not in flags.FLAGS:
                value.define(name, base)


def take(step: Any, given: dict[str, Any]) -> None:
    """Sets each option of ``step`` to its value in ``given``, or else to the value of its flag.

    Raises:
        TypeError: ``given`` has a name that is not an option of the step.
        UsageError: so it is, and Keras or a loop has it; or an option does not allow its value.
    """
    for name, declared in options(type(step)).items():
        value = given.pop(name) if name in given else flags.FLAGS[name].value
        setattr(step, name, declared.checked(name, value))
    for name in given:
        refuse_argument_of_step(type(step), name, options(type(step)))


def options(kind: type) -> dict[str, _Option]:
    """The options of the class ``kind`` and of its bases, by name."""
    attributes = {name: getattr(kind, name, None) for name in dir(kind)}
    return {name: value for name, value in attributes.items() if isinstance(value, _Option)}
