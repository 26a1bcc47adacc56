"""What is said of a worker that was lost; that it is said is tested with real ones elsewhere."""

from __future__ import annotations

import json
import threading

import pytest
import tensorflow as tf

from ctl.distributed import workers
from ctl.errors import PeerError, UsageError

GRAPH = (
    "Graph execution error:\n\nDetected at node while/CollectiveReduceV2 defined at (most recent "
    "call last):\n<stack traces unavailable>\n{}\n\t [[{{{{node while/CollectiveReduceV2}}}}]] "
    "[Op:__inference__train_steps_2065]"
)
STACK = (
    "Graph execution error:\n\nDetected at node while/CollectiveReduceV2 defined at (most recent "
    'call last):\n  File "<string>", line 59, in <module>\n\n  File "/loop.py", line 104, in run\n'
    "{}\n{}\n\t [[{{{{node while/CollectiveReduceV2}}}}]] [Op:__inference_run_1322]"
)
AGAIN = "The error could be from a previous operation. Restart your program to reset."
RESET = (
    "Collective ops is aborted by: recvmsg:Connection reset by peer\nAdditional GRPC error "
    "information from remote target /job:worker/replica:0/task:1 while calling "
    "/tensorflow.WorkerService/RecvBuf:\n:UNKNOWN:Error received from peer  {grpc_status:14, "
    'grpc_message:"recvmsg:Connection reset by peer"}\n' + AGAIN
)
PASSED_ON = (  # by worker 0
    "\nAdditional GRPC error information from remote target /job:worker/replica:0/task:0 while "
    "calling /tensorflow.WorkerService/CompleteInstance:\n:UNKNOWN:Error received from peer  "
    '{grpc_message:"Collective ops is aborted by: it was passed on", grpc_status:14}\n'
)
UNHEALTHY = (
    "Collective ops is aborted by: Error reported from /job:worker/task:1: The following tasks are "
    "unhealthy (stopped sending heartbeats):\n/job:worker/replica:0/task:1\n"
    "/job:worker/replica:0/task:12\nThe tasks have crashed. Check the task logs."
)
HEARTBEATS = (
    "Error reported from /job:worker/replica:0/task:1: The tasks have crashed or stopped sending "
    "heartbeats:\n/job:worker/replica:0/task:1"
)
HEARTBEATS_OF_1 = "worker 1 stopped sending heartbeats"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (GRAPH.format("Collective has timed out."), "Collective has timed out."),
        (
            GRAPH.format("Collective ops is aborted by: Socket closed Additional GRPC error info"),
            "Socket closed",
        ),
        ("Collective ops is aborted by: Connection reset by peer", "Connection reset by peer"),
        ("{{function_node __wrapped__Send_device_/task:0/CPU:0}} " + HEARTBEATS, HEARTBEATS_OF_1),
        (HEARTBEATS, HEARTBEATS_OF_1),
        (STACK.format("", RESET), "recvmsg:Connection reset by peer"),
        (
            STACK.format("    totals = run(feed)\n", "Collective ops is aborted by: " + RESET),
            "recvmsg:Connection reset by peer",
        ),
        (RESET + " [Op:CollectiveBcastRecv]", "recvmsg:Connection reset by peer"),
        (UNHEALTHY + PASSED_ON + AGAIN, "workers 1, 12 stopped sending heartbeats"),
        (
            STACK.format(
                "",
                "Collective ops is aborted by: Deadline Exceeded\n\n"
                "RPC: /tensorflow.CoordinationService/Heartbeat\n" + AGAIN,
            ),
            "Deadline Exceeded RPC: /tensorflow.CoordinationService/Heartbeat",
        ),
    ],
)
def test_the_reason_is_without_the_graph_around_it(message, reason):
    assert workers.reason(tf.errors.UnavailableError(None, None, message)) == reason


def test_who_has_left_at_the_end_is_not_lost(monkeypatch):
    """All is done then: a worker that passed the last barrier may be gone before another has."""
    calls = []

    def broken(strategy):
        calls.append(strategy)
        raise PeerError("Socket closed")

    monkeypatch.setattr(workers, "barrier", broken)
    workers.leave_together(tf.distribute.get_strategy())
    assert calls == []  # one worker has nobody to meet
    monkeypatch.setattr(workers, "is_multi_worker", lambda strategy: True)
    workers.leave_together(tf.distribute.get_strategy())
    assert len(calls) == 1


@pytest.mark.parametrize("text", [b"", b"odd", bytes(range(64)), "ungef\u00e4hr".encode() * 9])
def test_texts_of_any_length_are_exchanged_and_nothing_is_traced_again(ring2, monkeypatch, text):
    """Two replicas of one worker send the same."""
    monkeypatch.setattr(workers, "is_multi_worker", lambda strategy: True)
    monkeypatch.setattr(workers, "number_of", lambda strategy: 1)
    for _ in range(2):
        assert workers.all_gather(ring2, text, "a test") == [text]
        workers.barrier(ring2)
    assert workers._gathering(ring2).experimental_get_tracing_count() <= 2  # of two lengths


def test_a_worker_that_would_train_alone_is_warned_of(monkeypatch, warnings_of):
    """Each process of a program without the strategy of several would train its own model."""
    config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    for value in ("", "{", json.dumps(config)):
        assert not warnings_of()
        monkeypatch.setenv("TF_CONFIG", value)
        assert not workers.watch(tf.distribute.get_strategy())
    (warning,) = warnings_of()
    assert warning.startswith("TF_CONFIG names several processes, and this one trains alone")


def compared(monkeypatch, *facts: tuple) -> tuple[list[str], int]:
    """What each of two workers says when they compare their facts, and the bytes they gathered."""
    meet, texts, said = threading.Barrier(2), {}, ["", ""]
    gathered = []

    def all_gather(worker, text, doing):
        texts[worker] = text
        meet.wait(60)
        both = [texts[0], texts[1]]
        meet.wait(60)
        gathered.append(len(text))
        return both

    def run(worker):
        try:
            workers.check_agreement(worker, *facts[worker])
        except UsageError as error:
            said[worker] = str(error)

    monkeypatch.setattr(workers, "all_gather", all_gather)
    threads = [threading.Thread(target=run, args=[worker]) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said, sum(gathered)


def test_workers_compare_their_facts(monkeypatch):
    """Hashes first. Of what only some must have, what all have."""
    facts = {"layer dense": {"units": 8, "activation": "relu"}, **dict.fromkeys("abcdefgh", 1)}
    assert compared(monkeypatch, (facts, {"module": 1}), (facts, {"module": 1})) == (["", ""], 64)
    only = {"module": 1, "of the chief": 1}
    assert compared(monkeypatch, (facts, only), (facts, {"module": 1}))[0] == ["", ""]
    other = {**facts, "layer dense": {"units": 8, "activation": "tanh"}, "z": 1}
    expected = (
        'the workers do not agree: layer dense: activation is "relu" on worker 0, "tanh" on '
        'worker 1; module is 1 on worker 0, 2 on worker 1; z is "(absent)" on worker 0, 1 on '
        "worker 1; start all with the same code, flags and data"
    )
    assert compared(monkeypatch, (facts, only), (other, {"module": 2}))[0] == [expected] * 2
    said, _ = compared(monkeypatch, (facts,), (dict.fromkeys(facts, 0),))
    assert said[0].endswith(" and 4 more; start all with the same code, flags and data")
