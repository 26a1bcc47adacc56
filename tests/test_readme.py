"""README.md and the pages of the packages are true: their commands parse, their programs run, what
is said of Keras can be seen.
"""

from __future__ import annotations

import collections
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import file_lists
import keras
import numpy as np
import pytest
from paths import ROOT, SUPPORT

from ctl.inspect.__main__ import COMMANDS as INSPECT

sys.path.insert(0, str(ROOT / "benchmarks/peers"))

from claims import CLAIMS  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "ctl").glob("**/*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
README, ALL = TEXTS[PAGES[0]], "\n".join(TEXTS.values())
LINES = 250  # README.md is read in one go; what is longer has a page of its own
RUN = "/tmp/ctl-run"  # what the pages call a run; here it is another directory

# Of other programs: TensorBoard, Chromium, pytest, saved_model_cli; of absl.
FOREIGN_FLAGS = {"logdir", "headless", "window", "screenshot", "flagfile", "all"}
FOREIGN_FLAGS |= {"dir", "tag_set", "signature_def", "inputs", "input_exprs", "outdir", "overwrite"}


@pytest.mark.parametrize("page", file_lists.pages(), ids=lambda page: page.parent.name)
def test_the_lists_of_files_are_those_of_the_docstrings(page):
    """`python tests/support/file_lists.py` writes them."""
    assert page.read_text("utf-8") == file_lists.written(page)


def blocks(language: str, text: str = ALL) -> list[str]:
    """The fenced blocks of a language; of "", those that name none: commands."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def commands() -> list[list[str]]:
    """The commands of ctl on all pages: ``[module, flag, ...]``. Examples have no flags."""
    lines = [line for block in blocks("") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", ALL)
    found = []
    for line in lines:
        for command in line.split("&&"):
            words = shlex.split(command, comments=True) if "ctl." in command else []
            modules = [word for word in words if re.fullmatch(r"ctl(\.\w+)+", word)]
            if "-m" in words and modules and not modules[0].startswith("ctl.examples."):
                found.append(words[words.index(modules[0]) :])
    return found


# Modules without a function `run`, whose command is in another.
ELSEWHERE = {name: f"{name}.__main__" for name in ("ctl.inspect", "ctl.doctor")}
ELSEWHERE["ctl.schedule"] = "ctl.schedule.plot"


@pytest.fixture(scope="module")
def run(zygote, tmp_path_factory) -> Path:
    """A short run, with a model to load."""
    directory = tmp_path_factory.mktemp("readme") / "run"
    flags = "--model=dense", "--train_steps=20", "--notensorboard", "--jit_compile=off"
    zygote.run("ctl.train", f"--model_dir={directory}", *flags)
    return directory


def test_it_opens_with_the_two_commands():
    first = [line.split("#")[0].split() for line in blocks("", README)[0].splitlines()]
    assert [line[-1] for line in first[:-1]] == [f"--model_dir={RUN}"]
    assert first[-1][-3:] == ["pytest", "-n", "2"]
    assert README.index("```") < 600


def test_it_is_short():
    assert len(README.splitlines()) <= LINES


PARSE = """
import importlib
import json
import sys
from absl import flags
from absl.testing import flagsaver
from ctl.flags import parsing

def parse(main, usage, **_):
    lines = json.loads(sys.argv[2])
    parsing._import_named([a for a in lines[0] if "=ctl." in a])  # not "mine:MyStep"
    for line in lines:
        print("parses", line, file=sys.stderr)
        with flagsaver.flagsaver():  # no line sees what another has set
            flags.FLAGS([sys.argv[1], *line])

def run():
    command = importlib.import_module(sys.argv[1])
    parsing.run_command = command.run_command = parse
    command.run()
"""


@pytest.fixture(scope="module")
def parse(zygote, zygote_without_tensorflow, tmp_path_factory):
    """Parses the flags of a command, line by line, which need TensorFlow where they name code: all
    lines the same."""
    path = tmp_path_factory.mktemp("parse")
    (path / "parse_flags.py").write_text(PARSE)

    def parse(module: str, *lines: list[str], **kwargs):
        runs = zygote if any("=ctl." in word for word in lines[0]) else zygote_without_tensorflow
        return runs.run("parse_flags", module, json.dumps(lines), path=[path], **kwargs)

    return parse


def test_the_flags_of_every_command_parse(parse, run, tmp_path):
    (tmp_path / "cat").mkdir()  # a folder of the reader's, and files
    files = {name: tmp_path / name for name in ("wine.csv", "people.csv", "new.csv")}
    files["/tmp/ctl-clicks/train.txt"] = tmp_path / "train.txt"
    for file in files.values():
        file.touch()
    (tmp_path / "tfds" / "mnist").mkdir(parents=True)
    files |= {"s3://bucket/photos": f"file://{tmp_path}", "gs://bucket": f"file://{tmp_path}"}
    assert {command[0] for command in commands()} >= {"ctl.train", "ctl.evaluate", "ctl.schedule"}
    lines = collections.defaultdict(list)  # by the command and the code that they name
    for module, *arguments in dict.fromkeys(map(tuple, commands())):
        if "--help" in arguments or (module == "ctl.inspect" and not arguments):
            continue  # `test_every_flag_exists` runs it
        if module == "ctl.inspect":
            module = INSPECT[arguments.pop(0)][0]
        here = [a.replace(RUN, str(run)).replace("/shared/run", str(run)) for a in arguments]
        here = [a.replace("./photos", str(tmp_path)) for a in here]
        here = [a.replace("./new", str(tmp_path)) for a in here]
        for name, file in files.items():
            here = [a.replace(name, str(file)) for a in here]
        here = [a for a in here if "spm.model" not in a]  # which needs a package of an extra
        code = tuple(a for a in here if "=ctl." in a)
        lines[ELSEWHERE.get(module, module), code].append(here)
    for (module, _), of_one in lines.items():
        parse(module, *of_one)


def test_every_flag_exists(zygote_without_tensorflow):
    exist = set()
    modules = {command[0] for command in commands()} - {"ctl.inspect"}
    for command in [*((m,) for m in modules), *(("ctl.inspect", name) for name in INSPECT)]:
        module, *words = ELSEWHERE.get(command[0], command[0]), *command[1:], "--help"
        text = zygote_without_tensorflow.run(module, *words).stdout
        exist |= set(re.findall(r"^  --(?:\[no\])?(\w+)", text, re.MULTILINE))
    for recipe in ROOT.glob("ctl/recipes/*.py"):
        text = recipe.read_text("utf-8")
        exist |= set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', text))
        exist |= set(re.findall(r"^    (\w+): [^\n=]* = ctl\.option\(", text, re.MULTILINE))
    named = set(re.findall(r"(?<![\w-])--(\w+)", ALL)) - FOREIGN_FLAGS - {"help"}
    unknown = {n for n in named if n not in exist and n.removeprefix("no") not in exist}
    assert not unknown
    assert len(named) > 20


def test_a_wrong_flag_would_be_seen(parse):
    lines = ["--model_dir=x", "--epochs=3"], ["--model_dir=x", "--epohs=3"]
    assert "Unknown command line flag 'epohs'" in parse("ctl.train", *lines, exit_code=1).stderr


# Those of two pages run in `examples/test_pages.py::test_both_train_the_same_weights`.
PROGRAMS = [
    (page, program)
    for page, text in TEXTS.items()
    if page.stem not in ("from_keras_fit", "from_the_tutorial")
    for program in blocks("python", text)
]
# As `xla_where_asked` does for tests: to compile takes longer than these programs.
WITHOUT_XLA = """
from ctl.control import jit
from ctl.phases import apply

jit.why_not = lambda step, dataset: "a test"
apply.is_compiled = lambda device: False

"""


@pytest.mark.parametrize(
    ("page", "program"), PROGRAMS, ids=[str(page.relative_to(ROOT)) for page, _ in PROGRAMS]
)
def test_the_programs_run(zygote, page, program, run, tmp_path):
    """Each as a module, which runs as it is imported. XLA compiles those of README.md alone."""
    text = ("" if page == PAGES[0] else WITHOUT_XLA) + program.replace(RUN, str(run))
    (tmp_path / "program.py").write_text(f"{text}\n\ndef run():\n    pass\n", encoding="utf-8")
    output = zygote.run("program", path=[tmp_path], TMPDIR=str(tmp_path)).stdout
    assert output.strip(), "a program of a page shows what it does"


CLI = """
from tensorflow.python.tools import saved_model_cli

def run():
    saved_model_cli.main()
"""


def test_an_export_predicts_from_the_command_line(zygote, run, tmp_path):
    (tmp_path / "saved_model_cli.py").write_text(CLI)
    (block,) = (text for text in blocks("") if text.startswith("saved_model_cli"))
    block = block.replace(RUN, str(run)).replace("/tmp/ctl-", f"{tmp_path}/")
    shown = []
    for line in block.splitlines():
        program, *words = shlex.split(line)
        if program == "saved_model_cli":
            shown.append(zygote.run(program, *words, path=[tmp_path]).stdout)
        else:
            subprocess.run([sys.executable, *words], check=True)
    assert "inputs['image']" in shown[0]
    images, logits = np.load(tmp_path / "images.npy"), np.load(tmp_path / "logits/output_0.npy")
    model = keras.saving.load_model(run / "export/model.keras")
    np.testing.assert_allclose(logits, model(images), rtol=1e-5, atol=1e-6)


def test_what_is_quoted_of_the_code_is_there():
    """Line by line, with nothing left out."""
    (block,) = blocks("py", README)
    quotes = re.findall(r"^# (\S+): .*\n((?:(?!# ).*\n)+)", block, re.MULTILINE)
    assert [file for file, _ in quotes] == ["ctl/loop.py", "ctl/step.py", "ctl/reduce.py"]
    for file, quote in quotes:
        code = (ROOT / file).read_text("utf-8")
        depth = re.search(rf"^( *){re.escape(quote.splitlines()[0])}$", code, re.MULTILINE)[1]
        assert textwrap.indent(quote.strip(), depth) in code


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_every_picture_is_there(page):
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", TEXTS[page])
    links += re.findall(r'src="([^"]+)"', TEXTS[page])
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link
    assert links or page != PAGES[0]


def test_every_file_that_is_named_is_there():
    """On the pages, in docstrings and in comments."""
    texts = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]
    texts += [*ROOT.glob("ctl/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    for path in texts:
        named = re.findall(r"\b(?:ctl|tests|benchmarks)/[a-z_/]+\.py\b", path.read_text("utf-8"))
        for name in named:
            assert (ROOT / name).exists(), f"{path} names {name}"


def test_every_page_can_be_reached():
    seen, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        seen.add(page)
        links = re.findall(r"\]\(([^)#:]+\.md)", page.read_text(encoding="utf-8"))
        left += [p for link in links if (p := (page.parent / link).resolve()) not in seen]
    assert {*PAGES} <= seen


def test_who_wants_to_change_something_finds_it():
    rows = re.findall(r"^\| [^|]+ \| (`.*`) \|$", README.partition("| I want to change |")[2], re.M)
    assert len(rows) > 5
    for row in rows:
        for place in row.split("; "):
            name, file = re.fullmatch(r"`([\w.]+)`, `([\w/.]+)`", place).groups()
            text = (ROOT / "ctl" / file).read_text(encoding="utf-8")
            for part in name.split("."):
                assert re.search(rf"^ *(def|class) {part}\b", text, re.M), place


# What README.md says of Keras; where it is no longer so, the text must change. ctl's side of it is
# tested where ctl is; `benchmarks/why_not_fit.py` shows both.


# A default all-reduce that fails would leave the others of the process without one.
ALONE = [name for name, c in CLAIMS.items() if c.workers == 1 and name != "several_steps"]


@pytest.fixture(scope="module")
def keras_claims(zygote) -> dict[str, dict]:
    command = zygote.run("keras_claims", *ALONE, path=[SUPPORT, SUPPORT.parent])
    seen = [json.loads(line) for line in command.stdout.splitlines() if line.startswith("{")]
    return {each["name"]: each for each in seen}


@pytest.mark.parametrize("name", ALONE)
def test_keras_does_what_is_said(name, keras_claims):
    seen = keras_claims[name]
    assert seen["as_said"], f"take it out of README.md: {seen['text']}"


def test_all_that_is_said_of_keras_can_be_seen():
    table = README.partition("| In Keras |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    assert rows == [claim.says for claim in CLAIMS.values()]
