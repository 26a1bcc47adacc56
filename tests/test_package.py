"""The package: what is in the wheel, what it declares, and what is fast because it is lazy."""

from __future__ import annotations

import ast
import configparser
import contextlib
import email
import email.message
import hashlib
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from paths import ROOT
from zygote import Zygote

import ctl
from ctl.inspect.__main__ import COMMANDS as INSPECT

SOURCES = sorted((ROOT / "ctl").rglob("*.py"))
DATA = "ctl/data/datasets/fashion_mnist_mini/"

# Distribution -> what of it is imported, where the names differ.
IMPORTED_AS = {"absl-py": "absl", "ipython": "IPython"}


CACHES = shutil.ignore_patterns("__pycache__", "*.py[co]")
# Beside the sources: what a build needs, and what an sdist has on top.
BUILT_FROM = ("setup.py", "setup.cfg", "README.md", "LICENSE")
FOLDERS = (".ci", ".docs", ".github", "benchmarks", "tests")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy, in which a build leaves its files. Its folder has the name that a clone has."""
    folder = tmp_path_factory.mktemp("package") / "ctl"
    shutil.copytree(ROOT / "ctl", folder / "ctl", ignore=CACHES)
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout) -> zipfile.ZipFile:
    directory = checkout.parent
    # Without isolation no network is needed; TensorFlow and TensorBoard bring setuptools and wheel.
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command = [*build, "--wheel-dir", directory, checkout]
    environ = {**os.environ, "CTL_URL": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = directory.glob("*.whl")
    assert path.name == f"ctl-{ctl.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> dict[str, bytes]:
    """Its files by name, of a repository that has an address."""
    folder = tmp_path_factory.mktemp("sdist")
    for name in ("ctl", *FOLDERS):
        shutil.copytree(ROOT / name, folder / name, ignore=CACHES)
    for name in (*BUILT_FROM, "CONTRIBUTING.md", ".ruff.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "tests/__pycache__").mkdir()
    (folder / "tests/__pycache__/left_over.pyc").touch()
    program = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    environ = {**os.environ, "CTL_URL": f"{ADDRESS}/"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, cwd=folder, env=environ, capture_output=True, check=True)
    (path,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = [member for member in archive if member.isfile()]
        return {m.name.partition("/")[2]: archive.extractfile(m).read() for m in files}


@pytest.mark.slow
def test_the_sdist_has_all_that_the_checkout_has(sdist):
    """So its tests can be run, and its pages be read."""
    folders = [path for name in ("ctl", *FOLDERS) for path in (ROOT / name).rglob("*")]
    wanted = {str(path.relative_to(ROOT)) for path in folders if path.is_file()}
    built = r"\.py[co]$|^\.docs/(api|commands|site)/"
    wanted = {name for name in wanted if not re.search(built, name)}
    wanted |= {*BUILT_FROM, "CONTRIBUTING.md", ".ruff.toml"}
    assert {".github/CHANGELOG.md", ".github/terminal.png", "ctl/data/README.md"} <= wanted
    made = {name for name in sdist if name == "PKG-INFO" or name.startswith("ctl.egg-info/")}
    assert sdist.keys() - made == wanted


ADDRESS = "https://example.com/someone/ctl"


def test_what_pypi_shows_leads_to_the_tag_of_the_version(sdist):
    """It follows no relative link, and shows no relative picture."""
    declared = email.message_from_bytes(sdist["PKG-INFO"])
    text = declared.get_payload()
    urls = dict(line.split(", ") for line in declared.get_all("Project-URL"))
    assert urls["Source"] == ADDRESS and urls.keys() == {
        *("Source", "Documentation", "Changelog", "Issues")
    }
    at = f"{ADDRESS}/{{}}/v{ctl.__version__}"
    assert f"]({at.format('raw')}/.github/terminal.png)" in text
    assert f"]({at.format('blob')}/ctl/checkpoint/README.md#evaluate-export-use)" in text
    for link in [*re.findall(r"\]\(([^)\s]+)\)", prose(text)), *urls.values()]:
        assert link.startswith(f"{ADDRESS}"), link
        _, _, file = link.partition(f"/v{ctl.__version__}/")
        assert link in (ADDRESS, f"{ADDRESS}/issues") or (ROOT / file.partition("#")[0]).is_file()


@pytest.mark.slow
def test_without_an_address_pypi_shows_no_links(wheel):
    """The wheel of the fixture was built without one."""
    assert metadata(wheel).get_all("Project-URL") is None
    text, page = metadata(wheel).get_payload(), (ROOT / "README.md").read_text("utf-8")
    assert "](" not in prose(text) and "](" in prose(page)
    assert text.count("```") == page.count("```")
    assert re.findall(FENCED, text) == re.findall(FENCED, page)  # code is left as it is


FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def prose(page: str) -> str:
    return FENCED.sub("", page)


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(path))


def test_the_wheel_has_the_sources_the_pages_the_data_and_nothing_else(wheel):
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for path in SOURCES}
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / DATA).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert len(data) == 8  # six of the data set, its licence and its checksums
    clusters = {
        f"ctl/distributed/cluster/examples/{name}"
        for name in (
            "slurm.sh",
            "slurm_elastic.sh",
            "kubernetes_job.yaml",
            "kubernetes_elastic.yaml",
            "tfjob.yaml",
            "Dockerfile",
        )
    }
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "ctl").rglob("*.md")}
    assert {"ctl/README.md", "ctl/examples/from_keras_fit.md", "ctl/data/README.md"} <= pages
    others = {"ctl/py.typed", "ctl/examples/quickstart.ipynb"}
    assert files == sources | data | clusters | pages | others


def test_the_data_in_the_wheel_are_those_of_the_checksums(wheel):
    lines = wheel.read(f"{DATA}SHA256SUMS").decode().splitlines()
    assert len(lines) == 6
    for line in lines:
        digest, name = line.split()
        assert hashlib.sha256(wheel.read(DATA + name)).hexdigest() == digest
    for name in ("LICENSE", "1.0.0/LICENSE"):
        text = wheel.read(DATA + name).decode()
        assert "The MIT License" in text and "Zalando SE" in text
        assert "copyright notice and this permission notice shall be included" in text


def test_metadata(wheel):
    declared = metadata(wheel)
    assert declared["Name"] == "ctl" and declared["Version"] == ctl.__version__
    assert declared["Requires-Python"] == ">=3.10"
    assert declared["License"] == "Apache-2.0"
    assert declared["Summary"] == ctl.__doc__.splitlines()[0].rstrip(".")
    assert declared.get_payload().strip().startswith("# ctl")
    licences = [name for name in wheel.namelist() if re.search(r"dist-info/(.*/)?LICENSE$", name)]
    assert len(licences) == 1 and b"Apache License" in wheel.read(licences[0])


def test_every_console_script_can_be_called(wheel):
    (path,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    scripts = configparser.ConfigParser()
    scripts.read_string(wheel.read(path).decode())
    scripts = dict(scripts["console_scripts"])
    assert {"ctl-train", "ctl-evaluate", "ctl-inspect"} <= set(scripts)
    for name, target in scripts.items():
        assert callable(importlib.metadata.EntryPoint(name, target, "console_scripts").load())


def test_what_is_imported_is_declared(wheel):
    requirements = metadata(wheel).get_all("Requires-Dist")
    # These extras are what ctl itself imports.
    extras = ("privacy", "parquet", "mlflow", "wandb", "notebook", "stores", "hub")
    needed = [r for r in requirements if "extra ==" not in r or any(e in r for e in extras)]
    names = [re.match(r"[\w-]+", r)[0] for r in needed]
    declared = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
    imported = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    imported -= {*sys.stdlib_module_names, "ctl"}
    assert {"tensorflow", "keras"} <= imported <= declared
    # TFDS imports it without declaring it.
    assert declared - imported == {"importlib_resources"}


def test_an_editable_install_works_in_the_folder_that_holds_the_checkout(checkout, tmp_path):
    """Python finds the folder ``ctl/`` there, which has no ``__init__.py``."""
    program = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=checkout, capture_output=True, check=True)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path)
    # Without the other packages, one of which is the ctl that is tested.
    program = f"import site; site.addsitedir({str(tmp_path)!r}); import ctl; print(ctl.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=checkout.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{checkout / 'ctl/__init__.py'}\n"


def pinned(name: str) -> dict[str, Version]:
    lines = (ROOT / ".ci" / name).read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and line[0] != "#")
    return {canonicalize_name(package): Version(version) for package, version in pins.items()}


def test_the_lowest_pins_are_the_lower_bounds(wheel):
    """So ``.ci/compatibility`` tests what is declared."""
    lowest, newest = pinned("lowest.txt"), pinned("newest.txt")
    for line in metadata(wheel).get_all("Requires-Dist"):
        if "extra ==" not in line:
            requirement = Requirement(line)
            (bound,) = requirement.specifier
            name = canonicalize_name(requirement.name)
            assert bound.operator == ">=" and lowest[name] == Version(bound.version), line
            assert newest[name] >= lowest[name]


# What takes seconds to load, or is not needed to answer.
SLOW = ("tensorflow", "keras", "numpy", "tensorflow_datasets", "tensorboard")

# Folders and files of programs that are examples, or that commands start.
NO_COMMANDS = {"datasets", "plan", "examples", "probe.py", "sums.py"}
COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in SOURCES
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    and NO_COMMANDS.isdisjoint(path.relative_to(ROOT).parts)
] + [f"ctl.inspect {name}" for name in INSPECT]


def test_import_loads_and_changes_nothing():
    """No import hook, no handler and no descriptor: a library leaves these to the program. A module
    that is None in ``sys.modules`` cannot be imported."""
    program = (
        "import os, sys\n"
        "def state():\n"
        "    files = [os.fstat(number).st_ino for number in (1, 2)]\n"
        "    return [*sys.meta_path], [*sys.path_hooks], files, {**os.environ}\n"
        "before = state()\n"
        f"sys.modules.update(dict.fromkeys({SLOW!r}))\n"
        "import ctl\n"
        "assert state() == before\n"
        "assert ctl.__version__ and 'Loop' in ctl.__all__\n"
        "print(*(name for name in sys.modules if name.startswith('ctl')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {*done.stdout.split()} == {"ctl", "ctl.base", "ctl.base.lazy"}


STATE_OF_A_PROCESS = """
import builtins, gc, locale, logging, os, random, signal, socket, sys, threading, warnings
import absl.flags, absl.logging, keras, numpy as np, tensorflow as tf, tensorflow_datasets

def state():
    loggers = logging.root.manager.loggerDict.items()
    others = {n: l for n, l in loggers if isinstance(l, logging.Logger)}
    return {
        "environment": ({**os.environ}, os.getcwd(), [os.fstat(n).st_ino for n in (1, 2)]),
        "streams": (sys.stdout, sys.stderr, builtins.print),
        "loggers": {n: (l.level, [*l.handlers], [*l.filters]) for n, l in others.items()},
        "root logger": (logging.root.level, [*logging.root.handlers], logging.getLoggerClass()),
        "absl": (absl.logging.get_verbosity(), absl.logging.get_absl_handler().formatter),
        "flags": sorted(absl.flags.FLAGS),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.breakpointhook),
        "imports": ([*sys.meta_path], [*sys.path_hooks], [*sys.path]),
        "warnings": ([*warnings.filters], warnings.showwarning),
        "numpy": (np.get_printoptions(), np.geterr(), np.random.get_state()[1].tolist()),
        "random": random.getstate(),
        "keras": [getattr(keras.config, name)() for name in (
            "floatx", "epsilon", "image_data_format", "backend",
            "is_interactive_logging_enabled", "is_traceback_filtering_enabled",
        )] + [keras.config.dtype_policy().name, keras.Layer.__call__, keras.Model.fit],
        "custom objects": [n for n in keras.saving.get_custom_objects() if n[:4] != "ctl>"],
        "tensorflow": (
            tf.config.functions_run_eagerly(), tf.config.get_soft_device_placement(),
            tf.config.optimizer.get_jit(), tf.config.optimizer.get_experimental_options(),
            tf.config.threading.get_inter_op_parallelism_threads(),
            tf.distribute.has_strategy(), tf.function, tf.Variable.__init__,
            [tf.config.get_logical_device_configuration(d)
             for d in tf.config.list_physical_devices()],
        ),
        "interpreter": (gc.get_threshold(), gc.get_freeze_count(), sys.getrecursionlimit(),
                        sys.getswitchinterval(), locale.setlocale(locale.LC_ALL),
                        socket.getdefaulttimeout()),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }

before = state()
import ctl
for name in ctl.__all__:
    getattr(ctl, name)
after = state()
print(*(f"{name}: {before[name]} {after[name]}" for name in before if before[name] != after[name]))
"""


@pytest.mark.slow
def test_its_names_change_nothing_of_a_process():
    """What TensorFlow and Keras change when they are imported is theirs."""
    done = subprocess.run(
        [sys.executable, "-c", STATE_OF_A_PROCESS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout.strip()


@pytest.fixture(scope="module")
def without_slow(tmp_path_factory):
    """Runs ``python -m`` in processes in which importing one of `SLOW` is an error."""
    directory = tmp_path_factory.mktemp("without_slow")
    (directory / "as_main.py").write_text(
        "import runpy, sys\n"
        "def run():\n"
        "    runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\n"
    )
    with contextlib.closing(Zygote(directory, ["ctl.flags.parsing"], SLOW)) as started:
        yield lambda *words: started.run("as_main", *words, path=[directory]).stdout


@pytest.mark.parametrize("module", COMMANDS)
def test_help_needs_no_tensorflow(without_slow, module):
    assert f"python -m {module}" in without_slow(*module.split(), "--help")


def test_there_are_commands():
    assert {"ctl.train", "ctl.evaluate", "ctl.schedule"} <= set(COMMANDS)


def test_public_names_have_docstrings():
    """Methods, too; one that overrides another has that of the other."""
    found = []
    for package in (ctl, ctl.checkpoint, ctl.data, ctl.inspect, ctl.schedule):
        for name in package.__all__:
            public = getattr(package, name)
            assert inspect.getdoc(public), name
            for member, value in inspect.getmembers(public) if inspect.isclass(public) else ():
                of_ctl = (getattr(value, "__module__", None) or "").startswith("ctl")
                if not member.startswith("_") and (of_ctl or isinstance(value, property)):
                    assert inspect.getdoc(value), f"{name}.{member}"
                    found.append(member)
    assert {"train", "reduce", "all", "batches"} <= set(found)


def test_lazy_names():
    assert ctl.__all__ == sorted(set(ctl.__all__))
    for name in ctl.__all__:
        value = getattr(ctl, name)
        assert value.__name__.split(".")[-1] == name
    for package in (ctl, ctl.checkpoint, ctl.inspect, ctl.schedule):
        assert set(package.__all__) <= {*dir(package)}
        for name in package.__all__:
            assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Lop'"):
        ctl.Lop  # noqa: B018


def test_the_top_level_is_that_of_the_project():
    """What a trial leaves in a checkout is not committed."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is no checkout of git")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {name.split("/")[0] for name in listed.stdout.splitlines()}
    known = {"setup.cfg", "setup.py", "ctl", "tests", "benchmarks"}
    known |= {"README.md", "LICENSE", "CONTRIBUTING.md"}
    assert {name for name in names if not name.startswith(".")} == known
