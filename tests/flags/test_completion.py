"""A shell completes commands, flags and choices, and starts no program for it."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys

import pytest
from zygote import one_line

from ctl.__main__ import COMMANDS
from ctl.inspect.__main__ import COMMANDS as INSPECT

pytestmark = pytest.mark.slow  # reads the help of every command

# What bash gives the function of a completion; where `=` begins a word, it is one of its own.
CALL = """
source "$1"
complete -p ctl ctl-train
COMP_LINE=$2 COMP_POINT=${#2} COMP_WORDS=(${2//=/ = })
_ctl 2>/dev/null
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """``script(shell)``: the file that a shell reads."""
    path = tmp_path_factory.mktemp("completion")

    @functools.cache
    def written(shell: str) -> str:
        command = [sys.executable, "-m", "ctl", "completion", shell]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (path / shell).write_text(done.stdout)
        return str(path / shell)

    return written


@pytest.fixture(scope="module")
def replies(script):
    """``replies(line)``: what bash may put at its end."""
    file = script("bash")
    bash = shutil.which("bash")

    def replies(line: str) -> list[str]:
        command = [bash, "--norc", "-c", CALL, "bash", file, line]
        done = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        *registered, words = done.stdout.split("\n", 2)
        assert all(line.startswith("complete -o default -F _ctl ctl") for line in registered)
        return words.split()

    return replies


def test_commands(replies):
    assert replies("ctl ") == [*COMMANDS]
    assert replies("ctl tr") == ["train"]
    assert replies("ctl inspect ") == replies("ctl-inspect ") == [*INSPECT]


@pytest.mark.parametrize("command", ["ctl train", "ctl-train", "/opt/bin/ctl-train --seed=1"])
def test_flags(replies, command):
    assert replies(f"{command} --model_d") == ["--model_dir="]
    assert replies(f"{command} --dry") == ["--dry_run"]
    assert replies(f"{command} --nodry") == ["--nodry_run"]
    assert "--workers=" in replies(f"{command} --") and "--page=" not in replies(f"{command} --")


def test_each_command_has_its_own(replies):
    assert replies("ctl compare --p") == ["--page="]
    assert replies("ctl-launch --max") == ["--max_restarts="]
    assert replies("ctl inspect predict --meas") == ["--measured="]


def test_choices(replies):
    assert replies("ctl train --schedule=co") == ["constant", "cosine"]
    assert "skip" in replies("ctl train --on_nan=")
    assert "plateau" in replies("ctl-train --dry_run --schedule=")


def test_other_values_are_left_to_bash_which_completes_files(replies):
    assert replies("ctl train --dataset=./pho") == replies("ctl compare /tmp/") == []


def test_another_shell_is_refused(zygote_without_tensorflow):
    for words in ([], ["csh"], ["bash", "zsh"]):
        line = one_line(zygote_without_tensorflow.run("ctl.flags.completion", *words, exit_code=2))
        assert "bash, zsh, fish" in line


@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh")
def test_zsh_takes_the_script(script):
    subprocess.run(["zsh", "-n", script("zsh")], check=True)


def test_fish_has_the_words_of_bash(script):
    found = []
    for shell in ("bash", "fish"):
        with open(script(shell)) as file:
            found.append(re.findall(r'"(ctl[\w ]*)"\)?\s+echo "(.*)"', file.read()))
    assert found[0] == found[1] and {"ctl", "ctl train", "ctl inspect run"} <= {*dict(found[0])}


@pytest.mark.skipif(not shutil.which("fish"), reason="there is no fish")
def test_fish_completes(script):
    file = script("fish")
    expected = {
        "ctl tr": ["train"],
        "ctl inspect ": sorted(INSPECT),
        "/opt/bin/ctl-train --seed=1 --nodry": ["--nodry_run"],
        "ctl train --model_d": ["--model_dir="],
        "ctl train --schedule=co": ["--schedule=constant", "--schedule=cosine"],
        f"ctl train --dataset={file[:-1]}": [f"--dataset={file}"],
        f"ctl compare {file[:-1]}": [file],
    }
    program = f"source {file}; for line in $argv; complete -C $line; echo; end"
    command = ["fish", "--no-config", "-c", program, *expected]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    replies = [reply.split() for reply in done.stdout.split("\n\n")[: len(expected)]]
    assert dict(zip(expected, replies, strict=True)) == expected and done.stderr == ""
