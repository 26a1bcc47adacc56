"""The table of the page: which tutorials there are, and how many lines each loop has."""

from __future__ import annotations

import ast
import pathlib
import re

HERE = pathlib.Path(__file__).parent


def lines(*parts: ast.stmt) -> int:
    """Lines of functions and classes, without docstrings and comments; a statement is on one."""
    plain = ast.unparse(ast.Module([without_docstrings(part) for part in parts], []))
    return len([line for line in plain.splitlines() if line.strip()])


def without_docstrings(part: ast.stmt) -> ast.stmt:
    for node in ast.walk(part):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return part


def names(part: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}


def rows() -> list[str]:
    """A tutorial's loop is ``tutorial_NAME``. Its port is ``port_NAME``, with what it alone names
    of the steps and functions of the module; what both name is counted for neither."""
    found = []
    for path in sorted(HERE.glob("test_*.py")):
        text = path.read_text("utf-8")
        kinds = ast.FunctionDef | ast.ClassDef
        top = {node.name: node for node in ast.parse(text).body if isinstance(node, kinds)}
        loops = {name: node for name, node in top.items() if name.startswith("tutorial_")}
        of_tutorials = set().union(*map(names, loops.values()))
        for name, loop in loops.items():
            port = top[name.replace("tutorial_", "port_")]
            used = (names(port) & top.keys()) - of_tutorials
            url = re.findall(r"https://\S+", text[: text.index(f"def {name}(")])[-1].rstrip('",')
            place = url.removeprefix("https://www.tensorflow.org/")
            ours = lines(port, *(top[one] for one in sorted(used)))
            found.append(f"| [{place}]({url}) | `{path.name}` | {lines(loop)} | {ours} |")
    return found


def test_the_page_has_the_table():
    """If it fails: copy what it prints."""
    page, wanted = (HERE / "README.md").read_text("utf-8"), rows()
    assert len(wanted) >= 12
    found = [line for line in page.splitlines() if line.startswith("| [")]
    assert found == wanted, "\n" + "\n".join(wanted)
    ours, theirs = ([int(row.split("|")[n]) for row in wanted] for n in (4, 3))
    assert f"{sum(ours)} lines for {sum(theirs)}" in page, (sum(ours), sum(theirs))
