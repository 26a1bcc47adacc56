"""Says which tests to run first after a change: those of the changed modules, then their users'.

    python tests/first.py                       # of what git says has changed
    python tests/first.py ctl/reduce.py         # of these files
    python -m pytest -m "not slow" $(python tests/first.py ctl/reduce.py)

A test is of a module if it has its name: ``tests/phases/test_norms.py`` and ``test_norms_*.py``, of
``ctl/phases/norms.py``. Without one, tests that import the module stand for it; without these, all
tests of its folder. ``--users`` adds those that import it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tests_of(changed: Iterable[str], users: bool = False) -> list[str]:
    """The test files for ``changed`` files, all relative to the checkout, without repeats."""
    found: dict[str, None] = {}
    for name in changed:
        path = Path(name)
        if path.parts[0] == "tests" and path.name.startswith("test_"):
            found[name] = None
        elif path.parts[0] in ("benchmarks", "ctl", "tests") and path.suffix == ".py":
            named, importing = _named(path), _importing(path)
            chosen = [*named, *(importing if users or not named else ())]
            found |= dict.fromkeys(chosen or _of_folder(_folder_of(path)))
    return list(found)


def _folder_of(module: Path) -> Path:
    """The folder of the tests of ``module``."""
    first, *others = module.parent.parts
    return ROOT / "tests" / Path(*(others if first in ("ctl", "tests") else (first, *others)))


def _named(module: Path) -> list[str]:
    folder = _folder_of(module)
    patterns = f"test_{module.stem}.py", f"test_{module.stem}_*.py"
    files = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    return [str(path.relative_to(ROOT)) for path in files]


def _importing(module: Path) -> list[str]:
    name = ".".join(module.with_suffix("").parts).removesuffix(".__init__")
    name = name.removeprefix("tests.support.")
    files = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if name in _imports(path)]
    return [str(path.relative_to(ROOT)) for path in files]


def _of_folder(folder: Path) -> list[str]:
    files = sorted(folder.glob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files] or _of_folder(folder.parent)


@functools.cache
def _imports(test: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def _changed() -> list[str]:
    command = ["git", "diff", "--name-only", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="default: those that differ from the last commit")
    parser.add_argument("--users", action="store_true", help="also tests that import the modules")
    given = parser.parse_args()
    print(*tests_of(given.files or _changed(), given.users), sep="\n")
