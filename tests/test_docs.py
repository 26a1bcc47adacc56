"""Each public name says what it is. The site of them is built by .ci/run, with the extra `docs`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / ".docs"))

import public  # noqa: E402


def undocumented(path: str, value: Any) -> Iterator[str]:
    """``path`` if ``value`` has no docstring, and the public methods of a class that have none. An
    override may have that of its base."""
    members = vars(value) if inspect.isclass(value) else {}
    made = members and (value.__doc__ or "").startswith(f"{value.__name__}(")  # by a dataclass
    if made or not inspect.getdoc(value):
        yield path
    for name, member in members.items():
        is_method = inspect.isroutine(member) or isinstance(member, property)
        if is_method and not name.startswith("_") and not inspect.getdoc(getattr(value, name)):
            yield f"{path}.{name}"


def test_public_names_are_documented():
    found = []
    for path, module in public.modules().items():
        found += undocumented(path, module)
        for name, value in public.names(module).items():
            if inspect.isclass(value) or inspect.isroutine(value):
                found += undocumented(f"{path}.{name}", value)
    assert not found


PAGES = [ROOT / "README.md", *sorted((ROOT / "ctl").glob("**/*.md"))]


def exists(name: str) -> bool:
    """Whether the dotted ``name`` is a module, or an attribute that users get as it stands."""
    value: Any = importlib.import_module("ctl")
    for part in name.split(".")[1:]:
        if hasattr(value, part):
            value = getattr(value, part)
            continue
        try:
            value = importlib.import_module(f"{value.__name__}.{part}")
        except (AttributeError, ImportError):
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_ctl_on_a_page_exist(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    spans = re.findall(r"`([^`]+)`", text)
    names = {name for span in spans for name in re.findall(r"\bctl(?:\.[A-Za-z]\w*)+", span)}
    assert not [name for name in sorted(names) if not exists(name)]


def times_of(path: Path) -> Iterator[tuple[str, float]]:
    """The names and values of a module's constants in seconds."""
    for line in ast.parse(path.read_text("utf-8")).body:
        if isinstance(line, ast.Assign):
            (target,), value = line.targets, line.value
            several = isinstance(target, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if several else [(target, value)]
            for name, number in pairs:
                if isinstance(name, ast.Name) and name.id.endswith("SECONDS"):
                    yield name.id, ast.literal_eval(number)


def test_every_time_limit_is_in_the_table():
    """With its value, by the name of its module, or without if several modules have it."""
    page = (ROOT / "ctl/distributed/watch/README.md").read_text("utf-8")
    table = page.partition("## Every time limit")[2].partition('\n\n"Silent"')[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    told = {name: row[0] for row in rows for name in re.findall(r"`([\w.]+SECONDS)`", row[1])}
    modules = [*(ROOT / "ctl/distributed").rglob("*.py"), ROOT / "ctl/launch.py"]
    modules += [ROOT / f"ctl/base/{name}.py" for name in ("signals", "console")]
    found = [(f"{m.stem}.{name}", name, value) for m in modules for name, value in times_of(m)]
    assert len(found) > 30
    for name, bare, value in found:
        assert told.get(name, told.get(bare)) == f"| {value:g}", name
