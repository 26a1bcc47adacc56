"""The street plan holds: layers in one order, no circle, public names, short functions."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

import ctl

sys.path.insert(0, str(ROOT / "tests"))

import first  # noqa: E402

# The rooms, from below: files directly in ctl/ and its packages. Each imports only rooms before it.
LAYERS = (
    *("errors", "base", "distributed", "reduce", "flags", "data", "checkpoint", "schedule"),
    *("phases", "step", "control", "logs", "loop", "jobs", "inspect", "testing"),
    *(
        "train",
        "evaluate",
        "launch",
        "doctor",
        "compare",
        "__main__",
        "__init__",
        "recipes",
        "examples",
    ),
)
MOST_ARROWS = 130  # from a room to another
MOST_LINES = 60  # of a function of the hot path or of a command


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in ROOT.glob("ctl/**/*.py")}


@functools.cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text("utf-8"))


def imports(module: str) -> Iterator[str]:
    """The modules of ctl that ``module`` imports, wherever the import stands; of types, too."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("ctl."):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if f"{alias.name}.".startswith("ctl."))


def room(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


@functools.cache
def all_imports() -> dict[str, set[str]]:
    return {module: set(imports(module)) for module in MODULES}


def arrows() -> set[tuple[str, str, str]]:
    """(room, another that it imports, by which of its modules)."""
    return {
        (room(module), room(imported), module)
        for module, found in all_imports().items()
        for imported in found
        if room(module) != room(imported)
    }


def test_every_folder_is_a_package():
    """git would leave out an ``__init__.py`` that .gitignore names."""
    assert all((path.parent / "__init__.py").is_file() for path in ROOT.glob("ctl/**/*.py"))


def test_every_room_has_a_layer():
    assert {room(module) for module in MODULES} == set(LAYERS)


def test_rooms_import_those_below():
    upward = [a for a in arrows() if LAYERS.index(a[1]) > LAYERS.index(a[0])]
    assert not upward


def test_rooms_have_few_arrows():
    """More are harder to follow: move what is imported, or let its owner hand it on."""
    assert len({(one, other) for one, other, _ in arrows()}) <= MOST_ARROWS


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_imports_itself_by_way_of_others(module):
    seen, left = set(), [(module, ())]
    while left:
        at, way = left.pop()
        for imported in all_imports()[at] - {"ctl"}:
            assert imported != module, " -> ".join([*way, at, module])
            if imported not in seen:
                seen.add(imported)
                left.append((imported, (*way, at)))


# `ctl.x.y` in code, and `from ctl.x import y`.
PACKAGES = {"ctl": ctl, "ctl.data": ctl.data, "ctl.logs": ctl.logs, "ctl.flags": ctl.flags}
PACKAGES |= {"ctl.jobs": ctl.jobs, "ctl.checkpoint": ctl.checkpoint, "ctl.recipes": None}


@pytest.mark.parametrize("module", sorted(m for m in MODULES if room(m) in ("recipes", "examples")))
def test_recipes_and_examples_import_public_names(module):
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("ctl."):
            if not str(node.module).startswith("ctl.recipes"):
                assert {a.name for a in node.names} <= {*PACKAGES[node.module].__all__}
        elif isinstance(node, ast.Import):
            assert all(a.name == "ctl" for a in node.names if a.name.startswith("ctl"))
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in PACKAGES and owner != "ctl.recipes":
                assert node.attr in PACKAGES[owner].__all__, f"{owner}.{node.attr}"


def test_the_map_lists_the_rooms_from_above():
    page = (ROOT / "ctl/README.md").read_text("utf-8").split("## ")[0]
    listed = re.findall(r"^- \[?`(\w+)(?:\.py|/)`", page, re.MULTILINE)
    assert sorted(listed) == sorted(LAYERS)
    upward = [a for a in arrows() if listed.index(a[1]) < listed.index(a[0])]
    assert not upward


def test_the_page_has_the_public_names():
    page = (ROOT / "ctl/README.md").read_text("utf-8")
    table = page[page.index("## Public names") :].split("\n## ")[0]
    assert re.findall(r"^\| `ctl\.(\w+)`", table, re.MULTILINE) == ctl.__all__


def test_the_places_of_the_map_are_there():
    page = (ROOT / "ctl/README.md").read_text("utf-8")
    table = page[page.index("## Where to look") :].split("\n## ")[0]
    places = re.findall(r"`([\w.]+)`, `([\w/]+\.py)`", table)
    assert len(places) > 20
    for name, file in places:
        text = (ROOT / "ctl" / file).read_text("utf-8")
        for part in name.split("."):
            assert re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE), (name, file)


@pytest.mark.slow
def test_every_module_has_tests_that_are_found():
    """`python tests/first.py FILE` lists them."""
    for path in ROOT.glob("ctl/**/*.py"):
        tests = first.tests_of([str(path.relative_to(ROOT))])
        assert tests and all((ROOT / test).is_file() for test in tests), path
    assert first.tests_of(["ctl/phases/norms.py"]) == ["tests/phases/test_norms.py"]
    assert "tests/control/test_state.py" in first.tests_of(["ctl/control/state.py"])
    assert first.tests_of(["tests/chaos/judge.py"]) == ["tests/chaos/test_chaos.py"]
    assert first.tests_of(["benchmarks/scaling.py"]) == ["tests/benchmarks/test_scaling.py"]


def test_the_tests_that_hold_the_promises_are_there():
    """`tests/README.md` names files below `tests/`, and functions in them."""
    page = (ROOT / "tests/README.md").read_text("utf-8").split("\n## ", 1)[1]
    named = re.findall(r"`([\w/]+(?:\.py|/))(?:::(\w+))?`", page)
    assert len(named) > 50
    for file, function in named:
        test = ROOT / "tests" / file
        assert test.exists(), file
        assert not function or f"def {function}(" in test.read_text("utf-8"), function


def functions(code: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(code) if isinstance(node, ast.FunctionDef))


def test_functions_of_the_hot_path_and_of_the_commands_are_short():
    """Their code; not their docstrings, whose length is that of what they promise."""
    alone = [m for m in MODULES if m.count(".") == 1 and room(m) not in ("testing", "errors")]
    for module in alone:
        for function in functions(tree(module)):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            lines = function.body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= MOST_LINES, f"{module}.{function.name} has {lines} lines"


def test_what_the_flags_need_loads_no_tensorflow_at_the_top():
    """`--help` and a wrong flag answer at once; `tests/test_package.py` runs them."""
    starts = "ctl.flags", "ctl.distributed.cluster", "ctl.distributed.watch.watchdog"
    light = [m for m in MODULES if m.startswith(starts)]
    assert len(light) > 8
    for module in light:
        for node in tree(module).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            assert not {"tensorflow", "keras", "numpy"} & set(names), module


def test_private_names_of_tensorflow_are_in_one_module():
    pattern = re.compile(r"tensorflow\.(python|tsl|core|compiler)\b")
    found = {
        str(p.relative_to(ROOT))
        for p in ROOT.glob("ctl/**/*.py")
        if pattern.search(p.read_text("utf-8"))
    }
    assert found == {"ctl/base/tf_internals.py"}


def test_only_one_module_claims_to_be_the_only_place():
    """The claim needs a test; that of `ctl.base.tf_internals` is above."""
    files = [*ROOT.glob("ctl/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    found = {str(p.relative_to(ROOT)) for p in files if "only place" in p.read_text("utf-8")}
    assert found <= {"ctl/base/tf_internals.py"}


@pytest.mark.xdist_group("processes")
def test_pytest_xdist_keeps_groups(request):
    """It shows them at the end of the id. Where it loses them, tests that measure time limits run
    at once, and fixtures of modules are made twice."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("one process has no groups")
    assert request.node.nodeid.endswith("@processes")
