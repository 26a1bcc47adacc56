"""Output that cannot be written: a full disk, a closed stream, a reader that has ended."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import resource
import struct
import subprocess
import sys
import termios
import threading

import pytest

from ctl.base import console, durable
from ctl.base.streams import Descriptor
from ctl.errors import CheckpointError

needs_full_device = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="needs a device that is always full"
)


def run(main: str, redirection: str, *options: str) -> subprocess.CompletedProcess:
    """Runs the expression ``main`` as the main function of a command."""
    code = (
        "import errno, os, sys; from absl import logging; from ctl.errors import UsageError; "
        "from ctl.flags import parsing; sys.argv[1:] = []; "
        f"parsing.run_command(lambda: {main}, ''{''.join(f', {o}' for o in options)})"
    )
    command = ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_memory_that_is_exhausted_is_one_line():
    done = run("bytearray(1 << 62)", "")
    line = "out of memory: MemoryError; try a smaller model, or a smaller --global_batch_size\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_the_reason_is_that_of_the_system():
    """TensorFlow puts 200 characters of an operation and a path before it."""
    node = "{{function_node __wrapped__SaveV2_dtypes_9_device_/job:localhost/device:CPU:0}} "
    path = f"{'/long' * 40}/variables_temp/part-00000-of-00001.data; "
    for said in ("No space left on device", "File too large", "Read-only file system"):
        assert durable.reason_of(RuntimeError(f"{node}{path}{said} [Op:SaveV2]\nmore")) == said
    assert durable.reason_of(RuntimeError(f"{node}odd [Op:SaveV2]")) == "odd"
    assert durable.reason_of(OSError(5, "Input/output error")) == "Input/output error"


def test_what_controls_a_terminal_is_shown_instead():
    """Names in a manifest are of whoever wrote it."""
    said = console.for_terminal("was '\x1b]0;title\x07\x9b31m', is \u202e'é'\tand 'dense'")
    assert said == r"was '\x1b]0;title\x07\x9b31m', is \u202e'é'" + "\tand 'dense'"


@pytest.mark.slow
@needs_full_device
def test_output_on_a_full_disk_is_said_at_the_end():
    many = "[print('x' * 100) for _ in range(1000)] and logging.warning('the end')"
    line = "some of the standard output was lost: No space left on device"
    ended = run(many, ">/dev/full")
    assert (ended.returncode, ended.stderr.splitlines()[1:]) == (4, [line])
    assert "the end" in ended.stderr.splitlines()[0]
    ended = run(many, ">/dev/full", "output_is_log=True")
    assert (ended.returncode, ended.stderr.splitlines()[1:]) == (0, [line])


@pytest.mark.slow
@needs_full_device
def test_an_error_keeps_its_exit_code_on_a_full_disk():
    ended = run("[print('x')] + [].wrong", ">/dev/full")
    assert ended.returncode == 1 and "AttributeError" in ended.stderr
    main = "print('x'), (_ for _ in ()).throw(UsageError('wrong'))"
    ended = run(f"({main})", ">/dev/full")
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, "wrong")
    assert run(f"({main})", ">/dev/full 2>&1").returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_as_dev_null(closed):
    """Whatever the command opens has another number, or TensorFlow would write errors into it."""
    log = "logging.warning('w'), print('p'), print('e', file=sys.stderr), sys.stdout.isatty()"
    main = f"({log}, open('/dev/null').fileno() > 2 or sys.exit(7))"
    ended = run(main, closed)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ("p\n" if closed == "2>&-" else "")
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_pipe_that_is_not_the_output_keeps_its_traceback():
    ended = run("(_ for _ in ()).throw(BrokenPipeError(errno.EPIPE, 'of a worker'))", "")
    assert ended.returncode == 1 and "of a worker" in ended.stderr


def guarded(code: str) -> tuple[int, str]:
    """Runs ``code`` after `guard`. Returns the exit code and what it wrote to standard error."""
    code = f"import os, sys; from ctl.base import streams; streams.guard()\n{code}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stderr


@pytest.mark.slow
def test_standard_error_goes_where_its_descriptor_goes(tmp_path):
    """As in a child process that redirects its output."""
    log = tmp_path / "log"
    redirect = f"os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT), 2)\n"
    assert guarded(f"{redirect}print('python', file=sys.stderr)") == (0, "")
    assert log.read_text() == "python\n"


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "said"), [(0, "python\n"), (3, "python\nnative\n")])
def test_errors_of_native_code_can_be_held_and_those_of_python_are_not(fails, said):
    code = (
        "with streams.native_stderr_held():\n"
        "    os.write(2, b'native\\n')\n"
        "    print('python', file=sys.stderr)\n"
        f"    {fails} and sys.exit({fails})\n"
    )
    assert guarded(code) == (fails, said)


def test_only_standard_output_says_that_its_reader_has_ended_and_only_once():
    for name, raised in (("<stdout>", 1), ("<stderr>", 0)):
        read, write = os.pipe()
        os.close(read)
        descriptor = Descriptor(write, "w")
        descriptor.name = name
        stream, count = io.TextIOWrapper(io.BufferedWriter(descriptor)), 0
        for _ in range(3):
            try:
                print("x", file=stream, flush=True)
            except BrokenPipeError:
                count += 1
        assert count == raised
        assert isinstance(descriptor.lost, BrokenPipeError)


def test_a_pipe_that_does_not_block_gets_everything():
    read, write = os.pipe()
    os.set_blocking(write, False)
    stream = io.TextIOWrapper(io.BufferedWriter(Descriptor(write, "w")))
    text, got = "x" * 1_000_000, []
    with open(read) as pipe:
        reader = threading.Thread(target=lambda: got.append(pipe.read()))
        reader.start()
        print(text, file=stream, end="")
        stream.close()
        reader.join(60)
    assert got == [text]


def test_lines_fit_a_narrow_terminal_and_break_between_words():
    words = ["loss 0.4312", "accuracy 0.8521", "41.2k ex/s", "0:43 left", "lr 1.00e-3"] * 2
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        with open(theirs, "w", closefd=False) as terminal:
            assert console.columns(terminal) == 60
            lines = console.for_terminal(" ".join(words), terminal).splitlines()
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
            assert console.columns(terminal) == 80
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
            assert console.columns(terminal) == 80  # it does not say
    finally:
        os.close(ours)
        os.close(theirs)
    assert max(map(len, lines)) <= 60 and " ".join(map(str.strip, lines)) == " ".join(words)
    assert console.columns(io.StringIO()) == 80


def test_a_file_that_is_asked_for_is_whole_or_as_it_was(tmp_path):
    file = tmp_path / "made" / "out.csv"
    console.write_file("predictions", str(file), "earlier")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"cannot write --predictions={file}: File too"):
            console.write_file("predictions", str(file), "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "earlier" and list(file.parent.iterdir()) == [file]


def test_a_pipe_and_a_link_stay_what_they_are(tmp_path):
    reading, writing = os.pipe()
    console.write_file("plot", f"/dev/fd/{writing}", "through")
    assert os.read(reading, 100) == b"through"
    os.close(reading)
    os.close(writing)
    (tmp_path / "link").symlink_to("file")
    console.write_file("plot", str(tmp_path / "link"), "behind")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "behind"
