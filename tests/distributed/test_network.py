"""Two workers in two network namespaces: a link that delays and loses packets, and one that goes
away. Needs root and Linux's ``ip``."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from networks import WORKERS, bad_link, connect, run, two_namespaces
from test_multi_worker import assert_equal, one_device
from worker_jobs import assert_codes, last_line, run_job, said

pytestmark = pytest.mark.slow  # starts processes

DELAY_MS, LOSS_PERCENT = 5, 2  # of each packet, one way


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    with two_namespaces() as names:
        yield names


@pytest.mark.parametrize("kind", ["netem", "wire"])
def test_delay_and_loss_change_no_weights(job, tmp_path, mirrored, namespaces, kind):
    with bad_link(kind, namespaces, DELAY_MS, LOSS_PERCENT):
        run_job(job, tmp_path, "seeds=1", addresses=WORKERS, namespaces=namespaces)
    assert_equal(tmp_path, 2, one_device(mirrored))


def test_a_link_that_goes_away(job, tmp_path, namespaces):
    """No packet says so: neither worker is dead, each hears nothing of the other. The chief has
    trained some steps and waits; its peer waits for it."""
    connect(namespaces)
    with job(
        tmp_path, "slow=1", "timeout=15", "loop=1", addresses=WORKERS, namespaces=namespaces
    ) as processes:
        deadline = time.monotonic() + 90
        while "step 10\n" not in said(tmp_path, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        assert not run("ip", "-n", namespaces[1], "link", "set", "wire", "down").returncode
        (tmp_path / "go").touch()
        assert_codes(tmp_path, processes, [5, 5])
        assert time.monotonic() - began < 40
    for index in range(2):
        words = rf"worker {index} of 2: .* after step 1\d (timed out|broke off).*worker {1 - index}"
        assert re.search(words, last_line(tmp_path, index)), last_line(tmp_path, index)
