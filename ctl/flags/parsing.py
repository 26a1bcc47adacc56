"""The behaviour of every command line: grouped ``--help``, errors on one line, exit codes.

Imports no TensorFlow, so that ``--help`` and errors in flags appear at once. `ctl.flags.groups`
defines the flags.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import itertools
import math
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import absl.logging
from absl import app, flags

from ctl.base import __version__, console, durable, signals, streams, tracebacks
from ctl.base.names import check_name, code_name
from ctl.errors import CheckpointError, CtlError, PeerError, UsageError, exit_code_of
from ctl.flags import early, imports, synonyms

flags.disclaim_key_flags()  # They belong to the command that calls a group.

_groups: list[tuple[str, list[str]]] = []  # title and flags, in the order of --help
_imported: list[str] = []  # titles of those that modules of the user's define

AUTO = "auto"

_HELP = ("--help", "-help", "-h", "--helpshort", "--helpfull")


def run_command(
    main: Callable[..., None],
    usage: str,
    *,
    takes_command: bool = False,
    output_is_log: bool = False,
) -> None:
    """Parses the command line, calls ``main`` and exits, see `exit_codes`.

    ``--help`` prints ``usage`` and the flags of every `group`. A wrong flag is one line on stderr.
    Modules that flags name (`ctl.flags.imports`) are imported first: they may define flags.

    Args:
        main: called without arguments; with ``takes_command``, with the list of arguments that
            follow the flags or ``--``.
        usage: the first part of ``--help``.
        takes_command: whether the command line may end with ``-- COMMAND``.
        output_is_log: see `exit_codes`.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        own = _before_command(argv[1:]) if takes_command else argv[1:]
        with exit_codes():
            _import_named(own)
        if any(argument in _HELP for argument in own):
            with exit_codes():
                print(help_text(usage))
            raise SystemExit(0)
        try:
            positional = flags.FLAGS(argv)[1:]
        except flags.Error as error:
            _fail(_with_hint(error), UsageError.exit_code)
        for flag in flags.FLAGS.flags_by_module_dict().get(absl.logging.__name__, ()):
            if flag.present:  # defined by absl.logging, for handlers that ctl replaces
                _fail(_with_hint(flags.UnrecognizedFlagError(flag.name)), UsageError.exit_code)
        for name in grouped_flags():
            value = flags.FLAGS[name].value
            if isinstance(value, float) and not math.isfinite(value):
                _fail(f"--{name}={value} must be a finite number", UsageError.exit_code)
        if positional and not takes_command:
            _fail(f"unexpected argument {positional[0]!r}: see --help", UsageError.exit_code)
        return [argv[0], *positional]

    def call(argv: Sequence[str]) -> None:
        sys.unraisablehook = _unraisable
        with signals.deciding(), exit_codes(output_is_log):
            main(*([argv[1:]] if takes_command else []))
        signals.decided()

    streams.guard()
    app.run(call, flags_parser=parse)


def _before_command(arguments: Sequence[str]) -> list[str]:
    """The flags; also what is among them, if flags may follow it."""
    mixed = flags.FLAGS.is_gnu_getopt()
    return [*itertools.takewhile(lambda a: a != "--" and (mixed or a.startswith("-")), arguments)]


def run_one_of(commands: Mapping[str, tuple[str, str]], usage: str) -> None:
    """Runs the sub-command that the command line names first, with the rest of the command line.

    Without a name, prints ``usage`` and the sub-commands; with ``--version``, the version of ctl.

    Args:
        commands: by name: a module with a function ``run``, and a line that describes it.
        usage: the first part of ``--help``.

    Raises:
        SystemExit: the sub-command is unknown (2), or help or version were printed (0).
    """
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in commands:
        module, _ = commands[name]
        sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]
        importlib.import_module(module).run()
        return
    with exit_codes():
        if name.lstrip("-") in ("h", "help", "helpshort", "helpfull"):
            width = max(map(len, commands))
            lines = [f"  {name:<{width}}  {what}" for name, (_, what) in commands.items()]
            print("\n".join([usage.strip(), "", *lines]))
        elif name == "--version":
            print(f"ctl {__version__}")
        else:
            check_name("command", name, commands)


# What absl says of a value that is not one of the choices of a flag.
_NO_CHOICE = re.compile(r"flag --(\w+)=(.*): value should be one of <(.*)>", re.DOTALL)


def _with_hint(error: flags.Error) -> str:
    """The message of absl, with the closest choice if a value is none, and with the name here of a
    flag of other tools."""
    message = str(error)
    if isinstance(error, flags.UnrecognizedFlagError):
        name = error.flagname
        unknown = f"Unknown command line flag '{name}'"
        if advice := synonyms.here(name, grouped_flags()):
            return f"{unknown}: ctl calls it {advice}"
        close = difflib.get_close_matches(name, grouped_flags(), n=1, cutoff=0.75)
        return f"{unknown}. Did you mean: {close[0]} ?" if close else unknown
    if match := _NO_CHOICE.fullmatch(message):
        name, value, choices = match.groups()
        try:
            check_name(f"--{name}", value, choices.split("|"))
        except UsageError as error:
            return f"--{name}={value}: {error}"
    return message


def _import_named(arguments: Sequence[str]) -> None:
    """Imports the modules that ``arguments`` name. Their flags become a `group` each.

    Raises:
        UsageError: a module cannot be imported, or lacks what is named.
    """
    try:
        named = imports.named(arguments)
    except flags.Error as error:
        raise UsageError(str(error)) from error
    if named:
        imports.search_current_folder()
    for flag, name in named.items():
        early.check_code(flag, name)
    if named:
        console.load_tensorflow()  # in silence; the modules would load it
        imports.seed(arguments)
    for flag, name in named.items():
        imports.find(flag, name)
        module = code_name(name).module
        added = [n for n in imports.flags_of(module.partition(".")[0]) if n not in grouped_flags()]
        if added:
            _groups.append((f"Your module {module}", added))
            _imported.append(f"Your module {module}")


@contextlib.contextmanager
def exit_codes(output_is_log: bool = False) -> Iterator[None]:
    """Turns errors inside into one line on stderr and an exit code: that of a `CtlError`, 130 for
    Ctrl-C. If nothing else went wrong, 141 if the reader of the output has ended, and 4 if the
    output could not be written. An error in code of the user's keeps its traceback, see
    `ctl.base.tracebacks`.

    Args:
        output_is_log: whether the result of the command is elsewhere. Output that could not be
            written then does not change the exit code.
    """
    streams.guard()
    try:
        try:
            yield
        finally:
            lost = streams.lost_output()
            reader_ended = isinstance(lost, BrokenPipeError)
            if lost and not reader_ended:
                _say(f"some of the standard output was lost: {lost.strerror}")
        if reader_ended:
            raise SystemExit(128 + signal.SIGPIPE)
        if lost and not output_is_log:
            raise SystemExit(CheckpointError.exit_code)
    except PeerError as error:
        _say(str(error))
        console.leave(error.exit_code)
    except CtlError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt as error:
        _fail(str(error) or "interrupted", exit_code_of(error))
    except BrokenPipeError:
        if not reader_ended:  # of another pipe
            raise
        raise SystemExit(128 + signal.SIGPIPE) from None
    except Exception as error:
        # TensorFlow's, which is not imported here, and those of Python and NumPy.
        if isinstance(error, MemoryError) or (
            type(error).__name__ == "ResourceExhaustedError" and "OOM" in str(error)
        ):
            remedy = "try a smaller model, or a smaller --global_batch_size"
            _fail(f"out of memory: {durable.reason_of(error)}; {remedy}", UsageError.exit_code)
        if (theirs := tracebacks.of_the_user(error)) is None:
            raise
        print(tracebacks.text_of(theirs), file=sys.stderr)
        raise SystemExit(1) from None


def _unraisable(unraisable: Any) -> None:
    """Sends Ctrl-C again if it came while Python freed an object, where errors are ignored. Says
    nothing where TensorFlow frees what waits for a lost server: ctl says that the server is lost.
    """
    # Raised here, it would be ignored again.
    if isinstance(unraisable.exc_value, signals.Interrupted):
        console.leave(signals.Interrupted.exit_code, str(unraisable.exc_value))
    elif issubclass(unraisable.exc_type, KeyboardInterrupt):
        main = threading.main_thread().ident
        try:
            threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()
        except KeyboardInterrupt:  # `start` waits for the thread, long on a busy machine
            _unraisable(unraisable)
    elif getattr(unraisable.object, "__qualname__", "") != "Executor.__del__":
        sys.__unraisablehook__(unraisable)


def _say(message: str) -> None:
    message = _bounded(" ".join(message.split()))
    print(console.for_terminal(message), file=sys.stderr)


_LONGEST_WORD, _LONGEST = 400, 2_000  # characters


def _bounded(message: str) -> str:
    """``message`` without the middle of long values in it, which the user knows. Its ends are the
    name and the remedy."""
    message = re.sub(rf"\S{{{_LONGEST_WORD},}}", lambda word: _cut(word[0], 150), message)
    return message if len(message) <= _LONGEST else _cut(message, _LONGEST // 2 - 1)


def _cut(text: str, end: int) -> str:
    return f"{text[:end]}…{text[-end:]}"


def _fail(message: str, exit_code: int) -> None:
    _say(message)
    raise SystemExit(exit_code)


@contextlib.contextmanager
def group(title: str, values: flags.FlagValues = flags.FLAGS) -> Iterator[None]:
    """Flags defined inside appear in ``--help`` under ``title``, in the order of definition."""
    before = set(values)
    yield
    if values is flags.FLAGS:
        added = values._flags().keys() - before  # the only way to their order of definition
        _groups.append((title, [name for name in values._flags() if name in added]))


def imported_flags() -> list[str]:
    """Names of the flags that modules of the user's define, see `run_command`."""
    return grouped_flags(*_imported) if _imported else []


def grouped_flags(*titles: str) -> list[str]:
    """Names of the flags in the groups ``titles``; without titles, in all groups."""
    return [name for title, names in _groups if not titles or title in titles for name in names]


class _Converted(flags.ArgumentParser):
    def __init__(self, convert: Callable[[Any], Any]):
        self._convert = convert

    def parse(self, argument: Any) -> Any:
        return self._convert(argument)


def define(name: str, default: Any, help: str, convert: Callable[[Any], Any]) -> None:
    """Defines a flag whose value is what ``convert`` makes of the text, and of ``default``; it
    raises `ValueError` for what it does not take."""
    flags.DEFINE(_Converted(convert), name, default, help, serializer=flags.ArgumentSerializer())


def define_path(name: str, default: str | None, help: str) -> None:
    """Defines a flag whose value is a path, in which ``~`` is the home directory. The shell leaves
    the ``~`` of ``--flag=~/path`` as it is."""
    define(name, default, help, os.path.expanduser)


def flag_groups(values: flags.FlagValues = flags.FLAGS) -> Iterator[tuple[str, list[flags.Flag]]]:
    """The title and the flags of every `group`, in the order of ``--help``."""
    for title, names in _groups:
        yield title, [values[name] for name in names]


def choices_of(flag: flags.Flag) -> str:
    """``"a|b"`` of a flag that takes one of these values, else ``""``."""
    return "|".join(getattr(flag.parser, "enum_values", None) or ())


def help_of(flag: flags.Flag) -> str:
    """What ``flag`` does, and its default if it has one."""
    text = (flag.help or "").removeprefix(f"<{choices_of(flag)}>: ")  # absl puts the choices there
    if flag.default in (None, ""):
        return text
    shown = str(flag.default).lower() if flag.boolean else flag.default
    return f"{text} (default: {shown})"


def help_text(usage: str, values: flags.FlagValues = flags.FLAGS) -> str:
    """``usage`` and the flags of every `group`, with their defaults."""
    lines = [usage.strip(), "", "Flags, also from a file: --flagfile=FILE"]
    for title, members in flag_groups(values):
        lines += ["", f"{title}:"]
        for flag in members:
            name = f"[no]{flag.name}" if flag.boolean else flag.name
            lines.append("=".join(filter(None, (f"  --{name}", choices_of(flag)))))
            lines += textwrap.wrap(
                help_of(flag), 92, initial_indent=" " * 8, subsequent_indent=" " * 8
            )
    return "\n".join(lines)


def fit_default(name: str, value: object) -> bool:
    """Makes ``value`` the default of a flag, and returns whether it was another. If so, absl has
    called the checks of this flag again."""
    if flags.FLAGS[name].default == value:
        return False
    flags.FLAGS.set_default(name, value)
    return True


def check_without_effect(names: Iterable[str], why: str) -> None:
    """Raises `UsageError` if one of the flags ``names`` is on the command line with another value
    than its default. ``why`` ends the message: ``"without --watch"``."""
    for name in names:
        flag = flags.FLAGS[name]
        if flag.present and flag.value != flag.default:
            raise UsageError(f"--{name} has no effect {why}")


def check_flags(
    names: Sequence[str], check: Callable[..., object], values: flags.FlagValues = flags.FLAGS
) -> None:
    """Calls ``check`` with the flags ``names`` as keywords after parsing and after every change.

    A `UsageError` of ``check`` is reported as an error in flags, with its message unchanged; absl
    would put all flags and their values before it.
    """

    def checker(flag_values: dict[str, Any]) -> bool:
        try:
            check(**flag_values)
        except UsageError as error:
            raise flags.IllegalFlagValueError(str(error)) from error
        return True

    flags.register_multi_flags_validator(names, checker, flag_values=values)
