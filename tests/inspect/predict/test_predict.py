"""The cost model: formulas against hand-made numbers and against a simulation of every message."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import messages
import numpy as np
import pytest
import simulated
from paths import ROOT
from simulated import collective

from ctl.errors import UsageError
from ctl.inspect.commands import predict as predict_command
from ctl.inspect.measure import window
from ctl.inspect.measure.link import Measured, Point
from ctl.inspect.measure.timeline import join
from ctl.inspect.predict import efficiency
from ctl.inspect.predict.cost import (
    ALGORITHMS,
    Link,
    Network,
    gather,
    hierarchical,
    link_of,
    ring,
    tree,
)
from ctl.inspect.predict.model import Pack, Prediction, Step, measured_step, predict
from ctl.phases.plan.plan import Collective, Plan

PAGE = (ROOT / "ctl/inspect/predict/README.md").read_text(encoding="utf-8")
FAST, SLOW = Link(1e-6, 1e11), Link(1e-4, 1e9)


HOSTS = [(1, 2), (1, 3), (1, 12), (2, 2), (2, 4), (2, 6), (3, 5), (4, 1), (4, 3), (8, 4)]
SIZES = [1e3, 1e5, 1e6, 1e7, 1e9]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("per_host", "hosts"), HOSTS)
def test_a_ring_is_what_its_messages_take(per_host, hosts, size):
    network, replicas = Network(SLOW, FAST, per_host), per_host * hosts
    exact = 1e-9 if 1 in (per_host, hosts) else 0.1
    steps = 2 * (replicas - 1)
    expected = messages.seconds(network, messages.ring(range(replicas), size / replicas, steps))
    assert ring(network, replicas, size) == pytest.approx(expected, rel=exact)
    sent = messages.ring(range(replicas), size, replicas - 1)
    expected = messages.seconds(network, sent)
    assert gather(network, replicas, size) == pytest.approx(expected, rel=exact)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("per_host", "hosts"), HOSTS)
def test_a_hierarchy_is_what_its_messages_take(per_host, hosts, size):
    network = Network(SLOW, FAST, per_host)
    expected = messages.seconds(network, messages.hierarchical(hosts, per_host, size))
    assert hierarchical(network, per_host * hosts, size) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("per_host", "hosts"), HOSTS)
def test_a_tree_is_what_its_messages_take(per_host, hosts, size):
    """Of 32 chunks on links that are shared fairly: not always the best, in a deep tree. Where
    latency and transfer are alike, the way up is over before the way down needs the link."""
    network = Network(SLOW, FAST, per_host)
    sent = messages.double_tree(hosts, per_host, size, chunks=32)
    found = tree(network, per_host * hosts, size) / messages.seconds(network, sent)
    assert 0.85 < found < 1.3


def test_ring_formula():
    """2(n-1)·alpha + 2(n-1)/n·B/beta."""
    assert ring(Network(SLOW), 4, 8e6) == pytest.approx(6 * 1e-4 + 1.5 * 8e6 / 1e9)
    shared = Network(Link(1e-4, 1e9, shared=True))
    assert ring(shared, 4, 8e6) == pytest.approx(6 * (1e-4 + 8e6 / 1e9))


def test_hierarchical_formula():
    """8 replicas on 2 hosts: 3 steps of B/4 inside, 2 of B/2 outside, 3 of B/4 inside."""
    size = 8e6
    inside = 6 * (1e-6 + size / 4 / 1e11)
    outside = 2 * (1e-4 + size / 2 / 1e9)
    assert hierarchical(Network(SLOW, FAST, 4), 8, size) == pytest.approx(inside + outside)
    for count in (2, 5, 100):  # without hosts it is a ring
        network = Network(SLOW)
        assert hierarchical(network, count, size) == pytest.approx(ring(network, count, size))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_sane_up_to_100000_replicas(name):
    """Never below what the slowest link must carry; more replicas never take less."""
    network, size, before = Network(SLOW, FAST, 8), 1e8, 0.0
    for replicas in predict_command.DEFAULT_REPLICAS:
        seconds = ALGORITHMS[name](network, replicas, size)
        hosts = math.ceil(replicas / 8)
        assert seconds >= 2 * (hosts - 1) / hosts * size / SLOW.beta
        assert seconds >= before
        before = seconds


def test_latency_of_a_tree_grows_as_the_logarithm():
    network, n = Network(Link(1e-5, 1e10)), 4096
    assert ring(network, 16 * n, 1e6) > 15 * ring(network, n, 1e6)
    assert tree(network, 16 * n, 1e6) < 1.5 * tree(network, n, 1e6)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("replicas", [2, 4])
def test_a_link_is_found_again(shared, replicas):
    """A ring over a known link is measured: that link comes out, and cost of another size."""
    network = Network(Link(2e-4, 3e9, shared))
    sizes = [2**k for k in range(10, 28)]
    points = tuple(Point(size, ring(network, replicas, size)) for size in sizes)
    found = link_of(Measured("multi_worker", "ring", replicas, points), shared=shared)
    assert found.alpha == pytest.approx(2e-4) and found.beta == pytest.approx(3e9)
    assert found.shared == shared
    expected = ring(network, 7, 5e6)
    assert ring(Network(found), 7, 5e6) == pytest.approx(expected)


# The step --------------------------------------------------------------------------------------


def step(*packs: Pack, **kwargs) -> Step:
    return Step(forward=2.0, backward=4.0, apply=1.0, other=0.5, packs=packs, **kwargs)


@pytest.mark.parametrize(
    ("packs", "contention", "seconds", "communication", "exposed"),
    [
        ([(10, 1.0)], 1.0, 1.0, 1.0, 1.0),
        # Ready at 4 and 6: the first is hidden, the second begins when it is ready.
        ([(1, 0.5), (1, 1.0)], 1.0, 1.5, 3.0, 1.5),
        # Ready at 3 and 4: the second begins at 8 and ends at 13, 7 after the backward pass.
        ([(1, 0.25), (1, 0.5)], 1.0, 5.0, 10.0, 7.0),
        # 3 s of work from 4 on: in 2 s beside the backward half as much is done, 2 s are left.
        ([(1, 0.5)], 2.0, 3.0, 4.0, 2.0),
        ([(1, 0.5)], 2.0, 0.5, 1.0, 0.0),
    ],
    ids=["exposed", "early", "in order", "contention", "hidden"],
)
def test_packs_hide_behind_the_backward_pass(packs, contention, seconds, communication, exposed):
    made = step(*(Pack(*pack) for pack in packs), contention=contention)
    seen = predict(made, 2, lambda size: seconds * size / packs[0][0])
    assert (seen.communication, seen.exposed) == (communication, exposed)
    assert seen.step == 7.5 + exposed
    assert seen.efficiency == 7.5 / (7.5 + exposed)


def test_the_slowest_of_many_is_later():
    """As the means of drawn ones; of two and of three, they are known."""
    counts = [2, 3, 100, 10**4]
    waits = [predict(step(Pack(1, 1), jitter=0.1), n, lambda _: 0.0).wait for n in counts]
    drawn = np.random.default_rng(0).normal(0, 0.1, [200, 10**4])
    assert waits[:2] == pytest.approx([0.1 / math.sqrt(math.pi), 0.15 / math.sqrt(math.pi)])
    assert waits[2] == pytest.approx(drawn.reshape([-1, 100]).max(axis=1).mean(), rel=0.01)
    assert waits[3] == pytest.approx(drawn.max(axis=1).mean(), rel=0.01)
    assert predict(step(Pack(1, 1), jitter=0.1), 1, lambda _: 1.0) == Prediction(
        1, 7.5, 0.0, 0.0, 0.0, 1.0
    )


def test_strong_scaling_shares_the_examples():
    """Forward and backward shrink to a quarter; apply and other do not."""
    seen = predict(step(Pack(1, 1.0)), 4, lambda _: 0.5, strong=True)
    assert seen.step == 0.5 + 1.0 + 0.5 + 1.0 + 0.5
    assert seen.efficiency == 7.5 / 4 / 3.5


# What was measured -----------------------------------------------------------------------------


@pytest.mark.parametrize("packs", [1, 2, 4])
def test_a_measured_step_is_predicted(packs):
    """Out of the windows of a run on two workers: its phases, when packs are ready, and, with the
    time of a transfer, the step that was measured."""
    timeline = simulated.timeline(2, packs=packs, noise=0.01)
    found = measured_step(timeline)
    for name in ("forward", "backward", "apply"):
        assert getattr(found, name) == pytest.approx(simulated.PHASES[name], rel=0.05)
    assert found.other == pytest.approx(simulated.PHASES["input"], rel=0.05)
    assert [p.bytes for p in found.packs] == [4_000_000 // packs] * packs
    shares = [(k + 1) / packs for k in range(packs)]
    assert [p.ready for p in found.packs] == pytest.approx(shares, abs=0.02)
    assert 0 < found.jitter < 0.05 * found.alone
    seen = predict(found, 2, lambda _: simulated.TRANSFER)
    assert seen.step == pytest.approx(float(np.median(timeline.step_seconds)), rel=0.03)


def test_windows_without_a_forward_pass_predict_nothing():
    timeline = simulated.timeline(2)
    blind = simulated.with_phases(timeline, forward=timeline.phases["forward"] * np.nan)
    with pytest.raises(UsageError, match="no packs or no forward pass"):
        measured_step(blind)


# The command -----------------------------------------------------------------------------------


@pytest.fixture
def run(zygote_without_tensorflow):
    return functools.partial(zygote_without_tensorflow.run, "ctl.inspect.__main__", "predict")


STEP = ["--forward_ms=40", "--backward_ms=80"]


@pytest.mark.sample
def test_the_command_of_the_readme(run, tmp_path):
    """Its table, its picture, which is the one that the page shows, and its JSON."""
    (command,) = re.findall(r"^python -m ctl.inspect predict (.*--plot.*)$", PAGE, re.MULTILINE)
    picture = tmp_path / "efficiency.svg"
    arguments = command.replace("efficiency.svg", str(picture)).split()
    rows = [line.split() for line in run(*arguments).stdout.splitlines()[5:]]
    assert [row[0] for row in rows] == [f"{n:,}" for n in predict_command.DEFAULT_REPLICAS]
    curves = [e.get("class") for e in ElementTree.parse(picture).getroot().iter()]
    assert {"c0", "c1", "c2"} <= set(curves) and "c3" not in curves
    assert picture.read_text() == (ROOT / ".github/efficiency.svg").read_text()

    content = json.loads(run(*arguments, "--json", "--replicas=8,64").stdout)
    network = Network(Link(5e-6, 5e10), Link(2e-6, 2e11), 8)
    packs = Pack(25 << 20, 0.5), Pack(75 << 20, 1.0)
    times = functools.partial(hierarchical, network, 64)
    expected = predict(Step(0.04, 0.08, 0.0, packs), 64, times)
    assert content["predictions"]["hierarchical"][1] == pytest.approx(vars(expected))


def test_a_measured_run(run, tmp_path):
    for each in simulated.windows(2, packs=2):
        window.write(each, tmp_path / "inspect")
    arguments = [f"--measured={tmp_path}", "--outer=1ms,1GB/s", "--replicas=2", "--apply_ms=7"]
    content = json.loads(run(*arguments, "--json").stdout)
    timeline = join(window.read_all(tmp_path / "inspect"))
    expected = dataclasses.replace(measured_step(timeline), apply=0.007)
    assert content["step"] == json.loads(json.dumps(dataclasses.asdict(expected)))


def plan_file(path: Path, *packs: Collective, other: Sequence[Collective] = ()) -> Path:
    path.write_text(json.dumps(Plan("M", 4, 4, packs, tuple(other)).to_json()))
    return path


def test_a_plan(run, tmp_path):
    """Its gradients, in order; one that needs an unknown share needs all of the backward pass."""
    given = [*STEP, f"--plan={tmp_path / 'plan.json'}", "--outer=1ms,1GB/s", "--replicas=2"]
    packs = collective("pack0", 1000, 0.25), collective("pack1", 500, None)
    plan_file(tmp_path / "plan.json", *packs, other=[collective("loss", 4, 1.0)])
    expected = [{"bytes": 1000, "ready": 0.25}, {"bytes": 500, "ready": 1.0}]
    assert json.loads(run(*given, "--json").stdout)["step"]["packs"] == expected
    for pack, says in (
        (collective("pack0", None, 1.0), "plan.json: the size of pack0 is unknown: give --packs"),
        (collective("all", 1000, None, kind="ConcatV2"), "all is gathered: give --methods="),
    ):
        plan_file(tmp_path / "plan.json", pack)
        assert says in run(*given, exit_code=2).stderr
    (tmp_path / "plan.json").write_text("{}")
    assert "plan.json: not a plan of this version" in run(*given, exit_code=2).stderr


def test_ways_to_communicate(run, tmp_path):
    """Packs, gathers, what happens every 50 steps only, and what is not of a step."""
    loss, ok = collective("loss", 20, None, in_loop=False), collective("ok", 4, None)
    plans = {
        "plain": ("4ms", collective("pack0", 4_000_000, 1.0)),
        "int8": ("6ms", collective("while/gather", 1_000_000, None, kind="CollectiveGatherV2")),
        # Of a mirrored strategy: each replica sends its tensor to all others.
        "concat": ("7ms", collective("while/gather", 1_000_000, None, kind="ConcatV2")),
        "rare": ("5ms/50", collective("while/cond/CollectiveReduceV2", 4_000_000, 1.0)),
    }
    given = [
        f"{plan_file(tmp_path / f'{name}.json', pack, other=[ok, loss])}@{time}"
        for name, (time, pack) in plans.items()
    ]
    options = [f"--methods={','.join(given)}", "--outer=1ms,100MB/s", "--replicas=4"]
    done = run(*options, "--json")
    seen = {each.pop("name"): each for each in json.loads(done.stdout)["methods"]["4"]}
    flag = 6 * 1e-3 + 1.5 * 4 / 1e8
    whole, gathered = 6 * 1e-3 + 1.5 * 4e6 / 1e8, 3e-3 + 3e6 / 1e8
    assert seen == {
        "plain": pytest.approx({"step": 4e-3 + flag + whole, "sent": 6e6 + 6}),
        "int8": pytest.approx({"step": 6e-3 + flag + gathered, "sent": 3e6 + 6}),
        "concat": pytest.approx({"step": 7e-3 + flag + gathered, "sent": 3e6 + 6}),
        "rare": pytest.approx({"step": 5e-3 + flag + whole / 50, "sent": 6e6 / 50 + 6}),
    }
    lines = run(*options).stdout.splitlines()
    by_speed = ["rare", "int8", "concat", "plain"]
    assert [line.split()[0] for line in lines[-4:]] == by_speed


def test_a_measured_link(run, tmp_path):
    path = tmp_path / "link.json"
    points = [{"bytes": 2**k, "seconds": 1e-3 + 2**k / 1e9} for k in range(10, 25)]
    content = {"schema": 1, "strategy": "multi_worker", "operation": "ring", "replicas": 2}
    path.write_text(json.dumps(content | {"points": points}))
    done = run(*STEP, "--packs=1MB", f"--link={path}", "--replicas=2", "--json")
    (seen,) = json.loads(done.stdout)["predictions"]["ring"]
    assert seen["exposed"] == pytest.approx(1e-3 + 1e-3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--outer=5us,50GB/s", "--packs=1MiB"], "--forward_ms and --backward_ms"),
        ([*STEP, "--outer=5us,50GB/s"], "give --packs"),
        ([*STEP, "--packs=1MiB"], "either --outer"),
        ([*STEP, "--packs=4", "--outer=5us,1GB/s"], "--packs=4: give SIZE"),
        ([*STEP, "--packs=4MiB@2", "--outer=5us,1GB/s"], "--packs=4MiB@2"),
        ([*STEP, "--packs=4MiB", "--outer=5us"], "--outer=5us: give latency"),
        ([*STEP, "--packs=4MiB", "--outer=5us,0GB/s"], "--outer=5us,0GB/s"),
        ([*STEP, "--packs=4MiB", "--outer=5us,1GB/s", "--topology=hosts:8"], "--inner"),
        ([*STEP, "--packs=4MiB", "--outer=5us,1GB/s", "--topology=mesh"], "--topology=mesh"),
        ([*STEP, "--packs=4MiB", "--outer=5us,1GB/s", "--replicas=0"], "--replicas: '0'"),
        ([*STEP, "--packs=4MiB", "--outer=5us,1GB/s", "--algorithms=star"], "'star'"),
        ([*STEP, "--packs=1MB", "--outer=5us,1GB/s", "--replicas="], "--replicas is empty"),
        ([*STEP, "--packs=1MB", "--outer=5us,1GB/s", "--algorithms="], "--algorithms is empty"),
        (["--methods=plan.json", "--outer=5us,1GB/s"], "--methods=plan.json: give PLAN@TIME"),
        (["--methods=p.json@1ms/0", "--outer=5us,1GB/s"], "--methods=p.json@1ms/0: give"),
        (["--methods=nowhere.json@1ms", "--outer=5us,1GB/s"], "cannot read nowhere.json"),
        ([*STEP, "--packs=4MiB", "--link=nowhere.json"], "cannot read nowhere.json"),
        ([*STEP, "--packs=4MiB", "--outer=5us,1GB/s", "--plot=/dev/null/a.svg"], "cannot write"),
    ],
)
def test_an_error_is_one_line(run, arguments, says):
    refused = run(*arguments, exit_code=4 if says == "cannot write" else 2)
    assert says in refused.stderr and refused.stderr.count("\n") == 1


def test_labels_of_curves_do_not_cover_each_other():
    same = [Prediction(n, 1.0, 0.0, 0.0, 0.0, 0.5) for n in (2, 4)]
    text = efficiency.draw({"ring": same, "tree": same, "<b>": same}, "t & t", ("a", "b"))
    document = ElementTree.fromstring(text)
    labels = [e for e in document.iter() if (e.get("class") or "") in ("t0", "t1", "t2")]
    heights = sorted(float(e.get("y")) for e in labels)
    assert len(heights) == 3 and min(np.diff(heights)) >= 16
    assert any(e.text.startswith("<b>") for e in labels)
