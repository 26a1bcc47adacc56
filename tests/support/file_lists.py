"""Rewrites the lists of files on the pages of the packages: what docstrings of modules say first.

    python tests/support/file_lists.py

The order is that of the page, which is that of reading; a new file comes last.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LIST = re.compile(r"(?<=^Files, in the order of reading:\n\n)(?:- .*\n(?:  .*\n)*)+", re.MULTILINE)
_MAP = re.compile(r"(?<=^Files, from above:\n\n)(?:- .*\n(?:  .*\n)*)+", re.MULTILINE)
_COLUMNS = 120


def written(page: Path) -> str:
    """The text of ``page`` with its list as it should be."""
    text = _LIST.sub(lambda found: _entries(page.parent, found[0], False), page.read_text("utf-8"))
    return _MAP.sub(lambda found: _entries(page.parent, found[0], True), text)


def pages() -> list[Path]:
    return sorted(ROOT.glob("ctl/**/README.md"))


def _entries(folder: Path, before: str, init: bool) -> str:
    there = {path.name: path for path in folder.glob("*.py") if init or path.name != "__init__.py"}
    there |= {f"{path.parent.name}/": path for path in folder.glob("*/__init__.py")}
    order = re.findall(r"^- \[?`([\w./]+)`", before, re.MULTILINE)
    names = dict.fromkeys([*(name for name in order if name in there), *sorted(there)])
    return "".join(_entry(folder, name, there[name]) for name in names)


def _entry(folder: Path, name: str, module: Path) -> str:
    page = folder / name / "README.md"
    shown = f"[`{name}`]({name}README.md)" if name.endswith("/") and page.exists() else f"`{name}`"
    lines = textwrap.wrap(
        f"- {shown}: {_summary(module)}", _COLUMNS, subsequent_indent="  ", break_long_words=False
    )
    return "\n".join(lines) + "\n"


def _summary(module: Path) -> str:
    """The first sentence of the docstring of ``module``."""
    first = (ast.get_docstring(ast.parse(module.read_text("utf-8"))) or "").split("\n\n")[0]
    first = " ".join(first.split()).replace("``", "`")
    return re.split(r"(?<=\.) ", first)[0]


def _changed() -> Iterator[Path]:
    for page in pages():
        text = written(page)
        if text != page.read_text("utf-8"):
            page.write_text(text, "utf-8")
            yield page


if __name__ == "__main__":
    for changed in _changed():
        print(changed.relative_to(ROOT))
