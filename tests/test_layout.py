"""The layout holds: no import circle, four doors into `ctl.inspect`, one registry of each name."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): ast.parse(path.read_text("utf-8")) for path in ROOT.glob("ctl/**/*.py")}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(tree: ast.AST, function: str = "") -> Iterator[tuple[str, str]]:
    """The modules of ctl that ``tree`` imports when it runs, and the function that does, or ""."""
    for node in ast.iter_child_nodes(tree):
        if is_for_types(node):
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ctl"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module, function
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("ctl"):
                    yield alias.name, function
        is_function = isinstance(node, ast.FunctionDef)
        yield from imports(node, node.name if is_function else function)


# The only ways into the inspector: two methods of the step, and the pages of two commands.
DOORS = {("ctl.step", "plan"), ("ctl.step", "inspect")}
DOORS |= {("ctl.compare", "write_page"), ("ctl.evaluate", "write_report")}


def is_door(module: str, imported: str, function: str) -> bool:
    return imported.startswith("ctl.inspect") and (module, function) in DOORS


def test_the_core_opens_the_inspector_through_its_doors():
    found = {
        (module, function)
        for module, tree in MODULES.items()
        for imported, function in imports(tree)
        if imported.startswith("ctl.inspect") and not module.startswith("ctl.inspect")
    }
    assert found == DOORS


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_imports_itself_by_way_of_others(module):
    """The imports inside of functions count, too; the doors do not."""
    seen, left = set(), [(module, ())]
    while left:
        at, way = left.pop()
        for imported, function in imports(MODULES[at]):
            if is_door(at, imported, function) or imported == "ctl":
                continue
            assert imported != module, " -> ".join([*way, at, module])
            if imported not in seen:
                seen.add(imported)
                left.append((imported, (*way, at)))


def test_what_the_flags_need_loads_no_tensorflow_at_the_top():
    """`--help` and a wrong flag answer at once; `tests/test_package.py` runs them."""
    light = [
        m
        for m in MODULES
        if m.startswith(("ctl.flags", "ctl.distributed.cluster", "ctl.distributed.watch.watchdog"))
    ]
    assert len(light) > 8
    for module in light:
        for node in MODULES[module].body:
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


def test_the_loop_is_a_class_of_300_lines():
    loop = next(n for n in MODULES["ctl.loop"].body if getattr(n, "name", "") == "Loop")
    assert loop.end_lineno - loop.lineno < 300


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
