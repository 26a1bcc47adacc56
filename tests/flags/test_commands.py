"""The commands: one door, help, flag files, pipes and interrupts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from zygote import one_line

import ctl
from ctl.__main__ import COMMANDS
from ctl.base import names

TRAIN, EVALUATE = "ctl.train", "ctl.evaluate"


def test_one_door_to_the_commands(zygote_without_tensorflow):
    door = "ctl.__main__"
    text = zygote_without_tensorflow.run(door).stdout
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", text, re.MULTILINE)
    assert zygote_without_tensorflow.run(door, "--version").stdout == f"ctl {ctl.__version__}\n"
    line = one_line(zygote_without_tensorflow.run(door, "trian", exit_code=2))
    assert line.startswith("unknown command 'trian': did you mean 'train'? the choices are train,")
    train = [door, "train", "--model_dir=run", "--epochs=0"]
    line = one_line(zygote_without_tensorflow.run(*train, exit_code=2))
    assert line.startswith("--epochs=0.0 must be")


@pytest.mark.parametrize("module", [TRAIN, EVALUATE])
def test_help_lists_every_flag_once_with_its_default(zygote_without_tensorflow, tmp_path, module):
    command = zygote_without_tensorflow.run(module, "--help")
    assert command.stderr == ""
    listed = re.findall(r"^  --(?:\[no\])?(\w+)", command.stdout, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {"model_dir", "model", "dataset", "global_batch_size", "replicas", "seed"} <= set(listed)
    assert max(map(len, command.stdout.splitlines())) <= 100
    if module == TRAIN:
        for text in ("(default: 64)", "(default: 1e-3)", "(default: 12)", "(default: cosine)"):
            assert text in " ".join(command.stdout.split())
        for optimizer in names.OPTIMIZERS:
            assert optimizer in command.stdout


def test_help_into_a_pipe_that_closes():
    ended = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m ctl.train --help | head -n 1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stdout.startswith("Trains an image classifier")
    assert ended.stderr == ""


def test_flagfile(zygote_without_tensorflow, tmp_path):
    file = tmp_path / "flags"
    file.write_text(f"# A comment\n--model_dir={tmp_path}/run\n--replicas=5\n")
    line = one_line(zygote_without_tensorflow.run(TRAIN, f"--flagfile={file}", exit_code=2))
    assert line == "--global_batch_size=64 is not divisible by --replicas=5; 65 is"


@pytest.mark.parametrize("busy", [False, True])
def test_an_interrupt_while_an_object_is_freed_is_not_lost(
    zygote_without_tensorflow, tmp_path, busy
):
    (tmp_path / "freeing.py").write_text(
        "import signal, threading, time\n"
        "from ctl.flags import parsing\n"
        f"delays = [{1.0 if busy else 0.0}]\n"
        "class Slow(threading.Timer):\n"
        "    def start(self):\n"
        "        super().start()\n"
        "        time.sleep(delays.pop() if delays else 0.0)\n"
        "threading.Timer = Slow\n"
        "class Freed:\n"
        "    def __del__(self):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "def main():\n"
        "    Freed()\n"
        "    time.sleep(60)\n"
        "def run():\n"
        "    parsing.run_command(main, '')\n"
    )
    command = zygote_without_tensorflow.run("freeing", path=[tmp_path], exit_code=130)
    assert (command.stdout, command.stderr) == ("", "interrupted\n")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_pipe_that_nobody_reads_is_no_traceback(lines):
    code = (
        "import sys; from ctl.flags import parsing; sys.argv[1:] = []; "
        f"parsing.run_command(lambda: [print('x') for _ in range({lines})], '')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.read(0, 1); {code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    process.stdin.write("begin")
    process.stdin.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141
