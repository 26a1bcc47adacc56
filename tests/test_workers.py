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
