"""Writes the page of a command, from the flags that it defines::

    python .docs/command_page.py "ctl train" ctl.train

Runs the command up to where it would parse its command line. A process can do this once, since a
command defines its flags for the whole process.
"""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from typing import Any

from absl import flags
from sphinx.util.rst import escape

from ctl.flags import parsing, training

TRAIN = "ctl train"


def write_page(title: str, module: str) -> None:
    """Prints the page of the command whose function ``run`` is in ``module``. The flags of ``ctl
    train`` stand on its page alone."""
    define_flags = training.define_flags
    of_train: set[str] = set()

    def define(**options: Any) -> None:
        before = {group for group, _ in parsing.flag_groups()}
        define_flags(**options)
        of_train.update({group for group, _ in parsing.flag_groups()} - before)

    def run_command(main: Callable[..., None], usage: str, **options: Any) -> None:
        print(page(title, usage, () if title == TRAIN else of_train))

    # Before the module of the command takes them.
    training.define_flags, parsing.run_command = define, run_command
    importlib.import_module(module).run()


def page(title: str, usage: str, others: Collection[str]) -> str:
    """The page in reStructuredText: ``usage``, and every flag with its help and default, but for
    those of the groups ``others``."""
    parts = [_title(title, "="), *_usage(usage)]
    if others:
        parts.append(f"Takes the flags of :doc:`{TRAIN} <{TRAIN.replace(' ', '-')}>`, too.")
    parts.append(f".. program:: {title}")
    for group, members in parsing.flag_groups():
        if group not in others:
            parts += [_title(group, "-"), *map(_flag, members)]
    return "\n\n".join(parts)


def _usage(text: str) -> Iterator[str]:
    """Paragraphs, and what is indented as it stands."""
    for block in text.strip().replace("::\n\n", ":\n\n").split("\n\n"):
        if block.startswith(" "):
            yield ".. code-block:: none\n\n" + textwrap.indent(textwrap.dedent(block), "   ")
        else:
            yield _text(block)


def _flag(flag: flags.Flag) -> str:
    choices = parsing.choices_of(flag).replace("|", " | ")  # a narrow screen breaks them there
    written = "=".join(filter(None, (f"--{flag.name}", choices)))
    if flag.boolean:
        written += f", --no{flag.name}"
    return f".. option:: {written}\n\n   {_text(parsing.help_of(flag))}"


def _text(text: str) -> str:
    """``text`` on one line. What has backticks, and the name of a flag, becomes code."""
    parts = re.split(r"`+([^`]+)`+|(--\w[\w.:,/=*]*\w)", " ".join(text.split()))
    prose, *codes = (parts[i::3] for i in range(3))
    marked = [rf"\ ``{one or other}``\ " for one, other in zip(*codes, strict=True)]
    return "".join(a + b for a, b in zip(map(escape, prose), [*marked, ""], strict=True))


def _title(text: str, line: str) -> str:
    return f"{text}\n{line * len(text)}"


if __name__ == "__main__":
    write_page(*sys.argv[1:])
