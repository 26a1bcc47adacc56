"""ctl.distributed.cluster.slurm: who the workers are, by the variables of srun."""

from __future__ import annotations

import pytest
from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver

from ctl.distributed.cluster import Cluster, resolve
from ctl.distributed.cluster.slurm import expand_counts, expand_hosts
from ctl.errors import UsageError


def step(hosts="n[9-10]", counts="1(x2)", rank=0, job=7, **more) -> dict[str, str]:
    return {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_PROCID": str(rank),
        "SLURM_JOB_ID": str(job),
        **more,
    }


@pytest.mark.parametrize("text", ["n1", "n[1-2],m5,o[3-4,6,7-9]", "gpu-[008-011]", "a,b,c"])
def test_hosts_as_tensorflow_expands_them(text):
    assert expand_hosts(text) == slurm_cluster_resolver.expand_hostlist(text)


def test_hosts_with_two_ranges():
    assert expand_hosts("r[0-1]n[09-10].x") == ["r0n09.x", "r0n10.x", "r1n09.x", "r1n10.x"]


@pytest.mark.parametrize("text", ["1", "2(x3),1", "3(x2),2,1"])
def test_counts_as_tensorflow_expands_them(text):
    assert expand_counts(text) == slurm_cluster_resolver.expand_tasks_per_node(text)


def test_ranks_follow_the_list_of_hosts_and_ports_the_job():
    """n9 is rank 0, although n10 sorts before it; two tasks of a node have two ports."""
    first = resolve(None, None, step(SLURMD_NODENAME="n9"))
    assert first == Cluster(("n9:10070", "n10:10070"), 0, "Slurm")
    workers = ("n9:10080", "n9:10081", "n10:10080")
    assert resolve(None, None, step(counts="2,1", rank=2, job=2008)) == Cluster(workers, 2, "Slurm")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            step(SLURMD_NODENAME="n10"),
            "task 0 should be on n9, but is on n10: start with srun --di",
        ),
        (step(hosts="n[1-"), "'n[1-' is not a list of hosts"),
        (step(hosts="n[1-2"), "is not a list of hosts"),
        (step(hosts=""), "is not a list of hosts"),
        (step(counts="two"), "'two' is not a list of numbers of tasks"),
        (step(counts="1"), "cannot read the cluster from Slurm"),
        (step(rank=2), "there is no worker 2"),
        (step(rank="x"), "cannot read the cluster from Slurm"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NODELIST"),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(environ, words):
    with pytest.raises(UsageError) as error:
        resolve(None, None, environ)
    assert words in str(error.value) and "\n" not in str(error.value)
