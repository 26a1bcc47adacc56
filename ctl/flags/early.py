"""Finds code and data that flags name, in files: nothing is imported, so a mistake is said at once.

`ctl.flags.imports` imports the code after that.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import itertools
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from ctl.base.names import (
    CLICKS,
    IMAGES,
    LANGUAGE_MODEL,
    TABLES,
    TARS,
    TOKENIZERS,
    code_name,
    is_click_text,
    suffix,
)
from ctl.base.remote import is_pattern, located, scandir, unzipped
from ctl.base.stores import is_url
from ctl.errors import UsageError

_EMBEDDED = Path(__file__).parents[1] / "data" / "datasets"
_LOOKED_AT = 10_000  # files of a folder that may have images


def check_code(what: str, name: str) -> None:
    """Looks for the class or function ``name``, see `ctl.base.names.code_name`, in its source file.

    A module without a source file, or one that makes its names as it runs, is not looked into.

    Raises:
        UsageError: there is no such module or file, its source is no Python, or it has no such
            name.
    """
    module, attribute, file = code_name(name)
    if file and not file.is_file():
        raise UsageError(f"cannot import the {what} {name!r}: there is no file {file}")
    spec = None if file else _spec(what, name, module)
    source = str(file) if file else spec.origin if spec else None
    if source is None or not source.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(source).read_bytes(), source)
    except (SyntaxError, ValueError) as error:
        said, line = getattr(error, "msg", error), getattr(error, "lineno", None) or 1
        raise UsageError(
            f"cannot import the {what} {name!r}: SyntaxError: {said} ({source}:{line})"
        ) from error
    except OSError:
        return  # the import will say why
    known = list(_names(tree.body))
    if attribute in known or not {"*", "__getattr__"}.isdisjoint(known):
        return
    close = difflib.get_close_matches(attribute, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UsageError(
        f"cannot find the {what} {name!r}: {module} has no class or function {attribute!r}{hint}"
    )


def _spec(what: str, name: str, module: str) -> ModuleSpec | None:
    """Where ``module`` is; None if only an import can tell."""
    path, spec = None, None
    parts = module.split(".")
    for number in range(1, len(parts) + 1):
        full = ".".join(parts[:number])
        spec = _found(full, path)
        if spec is None:
            if full in sys.modules:
                return None
            file = (
                "" if len(parts) > 1 else f" Or name its file: FOLDER/{name.replace(':', '.py:')}"
            )
            raise UsageError(
                f"cannot import the {what} {name!r}: No module named {full!r}; is its folder on "
                f"PYTHONPATH?{file}"
            )
        path = spec.submodule_search_locations
        if path is None and number < len(parts):
            return None
    return spec


def _found(module: str, path: Sequence[str] | None = None) -> ModuleSpec | None:
    """As `importlib.util.find_spec`, which imports the packages that ``module`` is in."""
    finders = (finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for find in finders if (spec := find(module, path))), None)


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """The names that statements of a module may define."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                # `globals()["x"] = …` and `exec` define names that cannot be seen
                if node.id in ("globals", "exec", "vars", "setattr"):
                    yield "*"
                elif isinstance(node.ctx, ast.Store):
                    yield node.id
            elif isinstance(node, ast.alias):
                yield (node.asname or node.name).partition(".")[0]
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name


def check_tokenizer(path: str) -> None:
    """Raises `UsageError` if ``path`` is no file of a tokenizer, or its package is missing."""
    if suffix(path) not in TOKENIZERS:
        raise UsageError(
            f"the tokenizer {path} is neither a .model of SentencePiece nor a .json of tokenizers"
        )
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path} of a tokenizer")
    package = TOKENIZERS[suffix(path)]
    if not importlib.util.find_spec(package):
        raise UsageError(f"{path} needs a package: pip install 'ctl[{package}]'")


def check_path(path: str) -> None:
    """Raises `UsageError` if there is no file or folder ``path`` of data."""
    _check_no_text(path)
    place = located(path)
    kinds = (*TABLES, TARS, CLICKS)
    if is_pattern(place) and place.parent.is_dir():
        names = [entry.name for entry in scandir(place)]
        if others := [n for n in names if suffix(n) not in kinds and not is_click_text(n)]:
            raise UsageError(
                f"--dataset={path}: {others[0]} is no file that ctl reads: give files "
                f"{', '.join(kinds)}"
            )
        if names:
            return
    if place.exists():
        if place.is_file() and suffix(path) not in kinds and not is_click_text(path):
            raise UsageError(
                f"--dataset={path} is no file that ctl reads: give a file {', '.join(kinds)}, or a "
                "folder with a folder of images for each class"
            )
        return
    folder = place.parent
    near: list[str] = []
    if folder.is_dir():
        inside = [entry.name for entry in scandir(folder)]
        near = difflib.get_close_matches(place.name, inside, n=1)
    hint = f"; did you mean {folder / near[0]}?" if near else ""
    raise UsageError(f"--dataset={path}: there is no such file or folder{hint}")


def _check_no_text(path: str) -> None:
    """Refuses text, of which there is no one task. Click data have tabs in each line."""
    if suffix(path) == CLICKS and located(path).is_file() and not _has_tabs(path):
        command = LANGUAGE_MODEL.format(path=path)
        raise UsageError(f"--dataset={path} is text: for a language model of it, give {command}")


def _has_tabs(path: str) -> bool:
    """Whether the first line of a file has a tab. True if it has no line, or cannot be read: who
    reads it says why."""
    try:
        with located(path).open("rb") as raw:
            line = unzipped(raw, path).readline(1 << 16)
    except (OSError, EOFError, zlib.error):
        return True
    return b"\t" in line or not line


def check_dataset(name: str, data_dir: str | None) -> None:
    """Raises `UsageError` if TFDS, as it is installed, and ``data_dir`` have no dataset ``name``.
    Only names of a plain form are looked for, and only if TFDS has the layout that is known."""
    _check_no_text(name)
    short = re.split("[/:]", name)[0]
    if data_dir and is_url(data_dir):
        if not (located(data_dir) / short).is_dir():
            raise UsageError(
                f"{data_dir} has no dataset {short!r}: prepare it on a disk, and copy its folder "
                "there"
            )
        return
    if not short.isidentifier() or ":" in name:
        return
    if "tensorflow_datasets" in sys.modules:  # code of the user's may have added datasets to it
        return
    usual = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    prepared = Path(data_dir or usual).expanduser()
    if any((place / short).is_dir() for place in (_EMBEDDED, prepared)):
        return
    try:
        tfds = _found("tensorflow_datasets")
    except Exception:  # of a finder of others
        return
    root = Path(tfds.origin).parent if tfds and tfds.origin else None
    if root is None or not (root / "datasets").is_dir():
        return
    if (root / "datasets" / short).is_dir() or (root / "url_checksums" / f"{short}.txt").is_file():
        return
    known = {path.name for path in (root / "datasets").iterdir() if path.is_dir()}
    known |= {path.stem for path in (root / "url_checksums").glob("*.txt")}
    for path in root.glob("*/**/*.py"):
        if path.relative_to(root).parts[0] not in ("core", "datasets", "testing", "scripts"):
            source = path.read_text("utf-8", errors="replace")
            known |= {_snake(kind) for kind in re.findall(r"^class (\w+)\(", source, re.MULTILINE)}
    if short in known:
        return
    known |= {path.name for path in _EMBEDDED.iterdir() if path.is_dir()}
    near = difflib.get_close_matches(short, known - {"__pycache__"}, n=3)
    hint = f"; near: {', '.join(near)}" if near else ""
    hint += f"; files of your own are named by a path, such as ./{name}"
    if os.path.exists(name):
        hint = f" of TFDS: for the files of that name here, give --dataset=./{name}"
    raise UsageError(f"there is no dataset {name!r}{hint}")


def check_data_dir(dataset: str, data_dir: str) -> None:
    """Raises `UsageError` if ``dataset`` comes with ctl and ``data_dir`` has none of its name: the
    folder would not be read."""
    short = dataset.partition(":")[0]
    if is_url(data_dir) or not any((_EMBEDDED / short).glob("*/dataset_info.json")):
        return
    folder = Path(data_dir)
    if any((folder / short).glob("**/dataset_info.json")):
        return
    remedy = "name the dataset in it with --dataset, or leave it out"
    files = itertools.chain.from_iterable(folder.glob(depth) for depth in ("*", "*/*", "*/*/*"))
    if any(path.suffix.lower() in IMAGES for path in itertools.islice(files, _LOOKED_AT)):
        remedy = (
            f"to train on its images, give --dataset={os.path.abspath(data_dir)}: it needs a "
            "folder for each class"
        )
    raise UsageError(
        f"--data_dir={data_dir} has no effect with --dataset={dataset}, which comes with ctl: "
        f"{remedy}"
    )


def _snake(name: str) -> str:
    """The name that TFDS gives to a dataset of the class ``name``: ``FashionMNIST``."""
    first = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z0-9])([A-Z])", r"\1_\2", first).lower()
