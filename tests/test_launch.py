"""ctl.launch with real processes: output, codes, restarts, signals, no orphans."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_until

from ctl import launch
from ctl.launch import cluster

pytestmark = pytest.mark.slow  # starts processes

WHO = (
    "import json,os,sys,time; who=json.loads(os.environ['TF_CONFIG'])['task']; me=who['type']; "
    "task=who['index']; "
)


def start(
    *arguments: str, code: str = "", command: list[str] | None = None, stderr: int = subprocess.PIPE
) -> subprocess.Popen:
    command = [sys.executable, "-c", WHO + code] if command is None else command
    return subprocess.Popen(
        [sys.executable, "-m", "ctl.launch", *arguments, "--", *command],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 60) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def alive(pid: int) -> bool:
    """Whether ``pid`` runs: not gone, and not a zombie that nobody has waited for."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def environments(workers: int) -> dict[str, list[str | None]]:
    """What each process of a job is given, by the name that its output has."""
    variables = ("TF_CONFIG", "CTL_JOB_SECRET", "TF_NUM_INTRAOP_THREADS")
    code = f"print(json.dumps([*map(os.environ.get, {variables})])); print('oops', file=sys.stderr)"
    status, out, err = finish(start(f"--workers={workers}", code=code))
    assert status == 0
    assert sorted(err.splitlines()) == [f"[worker {i}] oops" for i in range(workers)]
    lines = (line.partition("] ") for line in sorted(out.splitlines()))
    return {name: json.loads(text) for name, _, text in lines}


def test_every_worker_gets_its_place_a_shared_secret_and_its_part_of_the_cores(monkeypatch):
    """A single one, which may have peers on other machines, gets no secret and all cores."""
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    three, two, one = map(environments, (3, 2, 1))
    assert list(three) == ["[worker 0", "[worker 1", "[worker 2"]
    configs = [json.loads(config) for config, *_ in three.values()]
    for index, config in enumerate(configs):
        assert config["task"] == {"type": "worker", "index": index}
        assert config["cluster"] == configs[0]["cluster"]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    (secret,), (other,) = ({own for _, own, _ in job.values()} for job in (three, two))
    assert secret != other and len(secret) == 32
    each = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [threads for *_, threads in two.values()] == [str(each)] * 2
    assert one["[worker 0"][1:] == [None, None]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_secret_and_a_number_of_threads_of_the_user_stay(monkeypatch, workers):
    monkeypatch.setenv("CTL_JOB_SECRET", "sesame")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "7")
    found = environments(workers).values()
    assert [own for _, *own in found] == [["sesame", "7"]] * workers


def test_lines_stay_whole():
    code = "[print('x' * 50, flush=True) for _ in range(1000)]"
    status, out, _ = finish(start("--workers=4", code=code))
    assert status == 0
    assert sorted(out.splitlines()) == sorted(1000 * [f"[worker {i}] {'x' * 50}" for i in range(4)])


def test_output_that_cannot_be_encoded_keeps_no_worker(monkeypatch):
    """More than a pipe holds, of what the encoding of the launcher lacks."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code = "[os.write(n, b'\\xc3\\xa9' * 50 + b'\\xff\\n') for _ in range(10000) for n in (1, 2)]"
    status, out, err = finish(start("--workers=1", code=code))
    assert status == 0
    said = "[worker 0] " + "\\xe9" * 50 + "\\ufffd"
    assert out.splitlines() == err.splitlines() == [said] * 10000


def test_a_job_whose_output_nobody_reads_goes_on():
    code = "[print('x' * 50, flush=True) for _ in range(10000)]; print('end', file=sys.stderr)"
    process = start("--workers=2", code=code)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert sorted(err.splitlines()) == [
        "[launch] nobody reads the standard output; the job goes on without it",
        "[worker 0] end",
        "[worker 1] end",
    ]


def test_a_job_of_which_nobody_reads_anything_goes_on(tmp_path):
    """`2>&1 | head`: what it says of that is not read either."""
    write = "[print('x' * 50, flush=True) for _ in range(10000)]"
    code = f"{write}; open('{tmp_path}/' + str(task), 'w').close()"
    process = start("--workers=2", code=code, stderr=subprocess.STDOUT)
    process.stdout.readline()
    process.stdout.close()
    try:
        assert process.wait(timeout=60) == 141
    finally:
        process.kill()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", "1"]


def test_ports_differ():
    addresses = cluster(50)["worker"]
    assert len(set(addresses)) == 50


ONE, ENDS = "sys.exit(7) if {} else time.sleep(100)", "exited with 7; ending the others"
FAILURES = {
    "one ends all": ("", ONE.format("task == 1"), 7, f"[launch] worker 1 {ENDS}"),
    # Worker 0 ends with 5, a lost peer, before worker 1 is seen to have died.
    "the cause, not who lost a peer": (
        *("", "(time.sleep(0.4), os.kill(os.getpid(), 9)) if task else os._exit(5)"),
        *(137, "worker 1 died of SIGKILL"),
    ),
    "a parameter server": (
        "--ps=1",
        ONE.format("me == 'ps'"),
        7,
        f"[launch] ps 0 {ENDS}",
    ),
    "the coordinator": ("--ps=1", ONE.format("me == 'chief'"), 7, f"[launch] chief 0 {ENDS}"),
    "again": ("--max_restarts=1", "sys.exit(9)", 9, "restart 1 of 1 in 0 s"),
    # A restart cannot mend these.
    **{
        f"exit code {code}": ("--max_restarts=3", f"sys.exit({code})", code, f"exited with {code}")
        for code in (2, 3, 42)
    },
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_ends_the_job_and_is_its_exit_code(failure):
    option, code, expected, said = FAILURES[failure]
    options = ["--workers=2", "--backoff=0", "--grace=1", *option.split()]
    status, _, err = finish(start(*options, code=code))
    assert status == expected
    assert said in err
    assert err.count("restart") == (failure == "again")


def test_restarts_on_new_ports_until_it_works(tmp_path):
    marks = tmp_path / "marks"
    code = (
        f"ports=json.loads(os.environ['TF_CONFIG'])['cluster']['worker']; path={str(marks)!r}; "
        "open(path,'a').write(ports[0]+'\\n') if task == 0 else None; time.sleep(0.5); "
        "sys.exit(9 if task == 0 and len(open(path).readlines()) < 3 else 0)"
    )
    status, _, err = finish(
        start("--workers=2", "--max_restarts=5", "--backoff=0.1", "--grace=4", code=code)
    )
    assert status == 0
    assert "restart 1 of 5 in 0.1 s" in err and "restart 2 of 5 in 0.2 s" in err
    assert "restart 3" not in err
    assert len(set(marks.read_text().splitlines())) == 3


def test_the_pause_before_a_restart():
    """It doubles up to 30 seconds, also when two to the number of restarts is no float."""
    pauses = [launch._pause_before(restart, 0.5) for restart in (0, 1, 5, 6, 1024, 10**6)]
    assert pauses == [0.5, 1, 16, 30, 30, 30]
    assert launch._pause_before(10**6, 0.0) == 0


@pytest.mark.parametrize("workers", ["2", "2..3"])
def test_a_signal_ends_the_pause_before_a_restart(workers):
    options = [f"--workers={workers}", "--max_restarts=1", "--backoff=30", "--grace=1"]
    process = start(*options, code="sys.exit(9)")
    for line in process.stderr:
        if "restart 1 of 1 in 30 s" in line:
            break
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 42


MEET = """
import os, socket, sys
from pathlib import Path
from ctl import cluster
from ctl.errors import CtlError
me, mark = cluster.resolve(None, None), Path(sys.argv[1])
taken = socket.socket()
if me.index == 1 and not mark.exists():
    mark.touch()
    taken.bind(("127.0.0.1", int(me.workers[1].rpartition(":")[2])))
    taken.listen()
try:
    cluster.meet(me, 60.0)
except CtlError as error:
    print(error)
    raise SystemExit(error.exit_code)
"""


def test_a_port_that_was_taken_in_between_is_chosen_again(tmp_path):
    command = [sys.executable, "-c", MEET, str(tmp_path / "mark")]
    options = ["--workers=2", "--max_restarts=1", "--backoff=0", "--grace=1"]
    status, out, err = finish(start(*options, command=command))
    assert "[worker 1] worker 1 cannot listen on 127.0.0.1:" in out
    assert "restart 1 of 1" in err and status == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_and_not_restarted(number):
    code = (
        "import signal; [signal.signal(n, lambda n, f: (print('got', n, flush=True), os._exit(42)))"
        " for n in (2, 15)]; print('up', flush=True); time.sleep(100)"
    )
    process = start("--workers=2", "--max_restarts=3", code=code)
    assert [process.stdout.readline().strip()[-2:] for _ in range(2)] == ["up", "up"]
    process.send_signal(number)
    status, out, err = finish(process)
    assert status == 42
    assert out.count(f"got {int(number)}") == 2
    assert "restart" not in err


def test_a_signal_that_workers_do_not_handle_yet():
    """Those of an elastic job handle it once they have begun, so they have lost nothing."""
    process = start("--workers=2..3", code="print('up', flush=True); time.sleep(100)")
    assert [process.stdout.readline().strip()[-2:] for _ in range(3)] == ["up"] * 3
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 42


@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 143)])
def test_a_second_signal(second, code):
    """A scheduler may repeat SIGTERM while a worker saves; a user who presses Ctrl-C again means
    it."""
    save = "print('saving', flush=True); time.sleep(2); os._exit(42)"
    worker = f"import signal\ndef stop(*_): {save}\nsignal.signal(15, stop)\n"
    process = start("--workers=1", code=worker + "print('up', flush=True); time.sleep(100)")
    assert process.stdout.readline().endswith("up\n")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline().endswith("saving\n")
    process.send_signal(second)
    status, _, said = finish(process)
    assert (status, "a second Ctrl-C: killed" in said) == (code, second == signal.SIGINT)


def test_a_grandchild_that_keeps_a_pipe_open_is_not_waited_for():
    """It has left the process group, and holds the standard output of the worker."""
    code = (
        "import subprocess; child = subprocess.Popen(['sleep', '1000'], start_new_session=True); "
        "print(child.pid, flush=True)"
    )
    process = start("--workers=1", code=code)
    pid = int(process.stdout.readline().split()[-1])
    try:
        assert process.wait(60) == 0
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_who_ignores_the_signal_is_killed_after_the_grace():
    code = "import signal; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); "
    process = start("--workers=1", "--grace=1", code=code + "time.sleep(100)")
    pid = int(process.stdout.readline().split()[-1])
    process.send_signal(signal.SIGTERM)
    status, _, err = finish(process)
    assert status == 128 + signal.SIGTERM
    assert not alive(pid)


def test_no_orphan_when_the_launcher_is_killed():
    """Grandchildren too: the workers are shells with a child each."""
    command = ["sh", "-c", "sleep 1000 & echo $$ $!; wait"]
    process = start("--workers=2", command=command)
    lines = [process.stdout.readline().split()[2:] for _ in range(2)]
    pids = [int(pid) for line in lines for pid in line]
    assert len(pids) == 4 and all(map(alive, pids))
    process.kill()
    process.wait()
    try:
        wait_until(lambda: not any(map(alive, pids)))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_a_killed_guard_does_not_end_the_job():
    """It is a fork of the launcher: its only child with the launcher's command line."""
    process = start("--workers=1", code="print('up', flush=True); time.sleep(1)")
    assert process.stdout.readline().endswith("up\n")
    mine = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    guards = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and (entry / "cmdline").read_bytes() == mine:
                guards.append(int(entry.name))
    (guard,) = guards
    os.kill(guard, signal.SIGKILL)
    status, _, err = finish(process)
    assert (status, err) == (0, "")


def test_a_process_that_cannot_be_killed_is_done_without(monkeypatch, capsys):
    """A thread in a system call of a hung disk. Its number stays with the guard; that of one that
    has ended is killed once, since it may be given out again."""
    killed, forgotten = [], []
    monkeypatch.setattr(launch, "DEATH_SECONDS", 0.05)
    monkeypatch.setattr(os, "killpg", lambda group, number: killed.append(group))
    job = object.__new__(launch._Job)
    job._guard = SimpleNamespace(forget=forgotten.append)
    codes = {7: None, 8: 3}
    job._tasks = [
        launch._Task(f"worker {pid}", "", SimpleNamespace(pid=pid, poll=lambda pid=pid: codes[pid]))
        for pid in codes
    ]
    for _ in range(2):
        job._kill_children()
    assert (killed, forgotten) == ([8], [8])
    for _ in range(2):
        job._kill(job._tasks[0])
    assert (killed, forgotten) == ([8, 7], [8])
    assert [task.poll() for task in job._tasks] == [-signal.SIGKILL, 3]
    assert "worker 7 cannot be killed" in capsys.readouterr().err


def test_codes_are_known_where_the_parent_ignores_the_end_of_children():
    program = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, '-m', 'ctl.launch', *sys.argv[1:]])"
    )
    command = ["--workers=2", "--", sys.executable, "-c", WHO + "sys.exit(3 * (task == 1))"]
    done = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr, done.stderr


def test_a_child_may_write_the_last_lines():
    """As a filter of the output does, while the others still end."""
    filters = "import sys, time; lines = sys.stdin.readlines(); time.sleep(0.5); print(*lines)"
    fails = (
        "import subprocess; out = subprocess.Popen([sys.executable, '-c', FILTERS], "
        "stdin=subprocess.PIPE); os.dup2(out.stdin.fileno(), 1); print('why', flush=True); "
        "os._exit(7)"
    )
    code = f"FILTERS = {filters!r}\nif task == 0: {fails}\ntime.sleep(5)"
    status, out, _ = finish(start("--workers=2", code="\n" + code))
    assert (status, out) == (7, "[worker 0] why\n[worker 0] \n")


def test_no_orphan_when_a_worker_leaves_one_behind():
    command = ["sh", "-c", "sleep 1000 & echo $!; exit 0"]
    status, out, _ = finish(start("--workers=1", command=command), timeout=30)
    assert status == 0
    assert not alive(int(out.split()[-1]))


@pytest.mark.parametrize(
    ("command", "words"),
    [([], "-- COMMAND"), (["no-such-program"], "no-such-program: No such file")],
)
def test_nothing_to_start_is_one_line(command, words):
    status, _, err = finish(start("--workers=2", command=command))
    assert status == 2
    assert words in err and len(err.splitlines()) == 1


def test_a_command_may_follow_without_dashes():
    command = [sys.executable, "-m", "ctl.launch", "--workers=2", "echo", "--help", "--", "-m"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0 and result.stdout.count("--help -- -m\n") == 2, result


def test_with_parameter_servers_a_worker_is_started_again_alone(tmp_path):
    """The coordinator and the parameter server are started once. The coordinator ends when worker 1
    has been started twice, the others then by themselves."""
    code = (
        f"where={str(tmp_path)!r}; name=me+str(task); "
        "open(where+'/'+name,'a').write('x')\n"
        "def starts():\n"
        "    try: return len(open(where+'/worker1').read())\n"
        "    except OSError: return 0\n"
        "if name == 'worker1' and starts() == 1: os.kill(os.getpid(), 9)\n"
        "while starts() < 2: time.sleep(0.05)\n"
    )
    options = ["--workers=2", "--ps=1", "--backoff=0.1", "--grace=5"]
    status, _, err = finish(start(*options, code=code))
    assert status == 0
    assert "worker 1 died of SIGKILL; the others go on; restarting it in 0.1 s" in err
    assert err.count("[launch]") == 1
    counts = {path.name: len(path.read_text()) for path in tmp_path.iterdir()}
    assert counts == {"chief0": 1, "worker0": 1, "worker1": 2, "ps0": 1}


def test_others_may_finish_after_a_signal():
    """One worker ends at once; another, which a second signal would kill, takes its time."""
    code = (
        "import signal\n"
        "def stop(*_):\n"
        "    signal.signal(15, signal.SIG_DFL)\n"
        "    time.sleep(2 * task)\n"
        "    print('saved', flush=True)\n"
        "    os._exit(42)\n"
        "signal.signal(15, stop); print('up', flush=True); time.sleep(100)"
    )
    process = start("--workers=2", code=code)
    assert [process.stdout.readline().strip()[-2:] for _ in range(2)] == ["up", "up"]
    process.send_signal(signal.SIGTERM)
    status, out, _ = finish(process)
    assert status == 42
    assert out.count("saved") == 2
