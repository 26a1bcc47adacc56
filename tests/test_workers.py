"""What is said of a worker that was lost; that it is said is tested with real ones elsewhere."""

from __future__ import annotations

import pytest
import tensorflow as tf

from ctl import workers
from ctl.errors import PeerError

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
    assert workers._reason(tf.errors.UnavailableError(None, None, message)) == reason


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
