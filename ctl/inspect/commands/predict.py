"""The command ``ctl.inspect predict``: predicts efficiency, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from ctl.base import console
from ctl.base.names import check_name
from ctl.base.units import GIB, KIB, MIB
from ctl.errors import UsageError
from ctl.flags.parsing import check_flags, group, run_command
from ctl.inspect.measure import FOLDER, link
from ctl.inspect.predict import cost
from ctl.inspect.predict.cost import Link, Network
from ctl.inspect.predict.model import (
    Method,
    Pack,
    Prediction,
    Step,
    measured_step,
    predict,
    predict_method,
    table_of_methods,
)
from ctl.phases.plan.plan import GATHERS, Plan, from_json

FLAGS = flags.FLAGS
flags.disclaim_key_flags()

_USAGE = """
Predicts the time of a step, its exposed communication and its efficiency on other numbers of
replicas, with three all-reduce algorithms: a model of the step, from what was measured on a few.

  python -m ctl.inspect predict --forward_ms=40 --backward_ms=80 --packs=25MiB@0.5,75MiB@1 \\
      --topology=hosts:8 --inner=2us,200GB/s --outer=5us,50GB/s --plot=efficiency.svg
  python -m ctl.inspect predict --plan=plan.json --forward_ms=4 --backward_ms=9 --link=link.json
  python -m ctl.inspect predict --measured=/tmp/run --link=link.json --replicas=2,3,4,100
  python -m ctl.inspect predict --methods=plain.json@4.1ms,int8.json@6ms,diloco.json@3.9ms/50 \\
      --outer=100us,100Mbit/s --replicas=2,4

--measured reads what `ctl.inspect run` wrote, --plan the output of `ctl.inspect plan --json`, and
--link the output of `benchmarks/all_reduce.py --json`. --methods compares ways to communicate that
are code of the step, such as those of ctl/recipes. Formulas are in ctl/inspect/predict/cost.py.
"""

DEFAULT_REPLICAS = [2**k for k in range(1, 17)] + [100_000]
_MOST_REPLICAS = 10_000_000

_TIMES = {
    "forward": "Milliseconds of the forward pass.",
    "backward": "Milliseconds of the backward pass.",
    "apply": "Milliseconds of the update of the weights.",
    "other": "Milliseconds of the input and everything else.",
    "jitter": "Standard deviation of the compute time, in milliseconds.",
}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"MB/s": 1e6, "GB/s": 1e9, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}
_SIZES = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "MB": 10**6, "GB": 10**9}


def run() -> None:
    """Defines the flags and runs the command."""
    with group("The step of one replica"):
        flags.DEFINE_string(
            "measured",
            None,
            "A --model_dir with the output of `ctl.inspect run`, which has all of the values "
            "below.",
        )
        flags.DEFINE_string(
            "plan", None, "Output of `ctl.inspect plan --json`: the packs, and when they are ready."
        )
        flags.DEFINE_list(
            "packs", None, "Packs, each as SIZE@SHARE: it needs this share of the backward pass."
        )
        for name, what in _TIMES.items():
            flags.DEFINE_float(f"{name}_ms", None, what, lower_bound=0)
        flags.DEFINE_float(
            "contention",
            1.0,
            "Factor by which a transfer takes longer while the backward pass runs, if both need "
            "the same cores.",
            lower_bound=1,
        )
    with group("Several ways to communicate"):
        flags.DEFINE_list(
            "methods",
            None,
            "PLAN@TIME of each method, where TIME is the time of a step on a link of almost no "
            "cost. PLAN@TIME/N if the conditional part of the plan happens every N steps. The "
            "table lists the fastest first.",
        )
    with group("The network"):
        flags.DEFINE_string(
            "topology",
            "flat",
            "flat: one link per replica; hosts:N: N replicas on a host, which share its outer "
            "link; shared: all replicas share one link, such as processes of one machine.",
        )
        flags.DEFINE_string(
            "outer", None, "Latency and bandwidth of the outer link, e.g. 5us,50GB/s."
        )
        flags.DEFINE_string("inner", None, "Latency and bandwidth inside a host.")
        flags.DEFINE_string(
            "link", None, "Output of `benchmarks/all_reduce.py --json`, for the outer link."
        )
    with group("What is predicted"):
        flags.DEFINE_list("replicas", None, "Numbers of replicas (default: 2, 4, 8, … 100000).")
        flags.DEFINE_list("algorithms", list(cost.ALGORITHMS), "All-reduce algorithms.")
        flags.DEFINE_boolean(
            "strong",
            False,
            "Strong scaling: all replicas share one global batch. Otherwise each has its own.",
        )
        flags.DEFINE_boolean("json", False, "Print one JSON object.")
        flags.DEFINE_string("plot", None, "SVG file to write.")
    check_flags(["algorithms"], _check_algorithms)
    run_command(main, _USAGE)


def _check_algorithms(algorithms: list[str]) -> None:
    if not algorithms:
        raise UsageError(f"--algorithms is empty: name some of {', '.join(cost.ALGORITHMS)}")
    for name in algorithms:
        check_name("algorithm", name, cost.ALGORITHMS)


def main() -> None:
    """Predicts the step that the flags describe; prints the predictions and draws them."""
    network, counts = read_network(), read_replicas(FLAGS.replicas)
    if FLAGS.methods:
        for name in ("measured", "plan", "packs", "algorithms", "strong", "plot"):
            if FLAGS[name].present:
                raise UsageError(f"--{name} has no effect with --methods: leave it out")
        _compare(list(map(parse_method, FLAGS.methods)), network, counts)
        return
    step = read_step()
    strong = FLAGS.strong
    curves = {
        name: [
            predict(step, n, functools.partial(cost.ALGORITHMS[name], network, n), strong=strong)
            for n in counts
        ]
        for name in FLAGS.algorithms
    }
    if FLAGS.plot:
        _plot(step, network, curves)
    if FLAGS.json:
        about = {"step": step, "network": network, "strong": strong, "predictions": curves}
        _print_json(about)
    else:
        print(table(step, network, curves))


def read_step() -> Step:
    """The step that the flags describe.

    Raises:
        UsageError: a part of the step is missing, or a file is not what it should be.
    """
    step = Step(0.0, 0.0, 0.0, (), contention=FLAGS.contention)
    if FLAGS.measured:
        from ctl.inspect.measure.timeline import join
        from ctl.inspect.measure.window import read_all

        directory = Path(FLAGS.measured)
        inside = directory / FOLDER  # if it is a --model_dir
        windows = read_all(inside if inside.is_dir() else directory)
        step = measured_step(join(windows), FLAGS.contention)
    given: dict[str, Any] = {
        name: milliseconds / 1e3
        for name in _TIMES
        if (milliseconds := FLAGS[f"{name}_ms"].value) is not None
    }
    if not FLAGS.measured and not {"forward", "backward"} <= set(given):
        raise UsageError("give --measured=DIR of a run, or --forward_ms and --backward_ms")
    if FLAGS.plan:
        step = dataclasses.replace(step, packs=packs_of_plan(FLAGS.plan))
    if FLAGS.packs:
        step = dataclasses.replace(step, packs=tuple(map(parse_pack, FLAGS.packs)))
    if not step.packs:
        raise UsageError("give --packs=SIZE@SHARE,…, --plan=FILE or --measured=DIR of a run")
    return dataclasses.replace(step, **given)


def _compare(methods: list[Method], network: Network, counts: list[int]) -> None:
    """Prints the predictions for ``methods``."""
    rows = {n: [predict_method(method, network, n) for method in methods] for n in counts}
    if FLAGS.json:
        _print_json({"network": network, "methods": rows})
        return
    print(_describe_network(network))
    for n, found in rows.items():
        print("\n".join(["", *table_of_methods(found, n)]))


def parse_method(text: str) -> Method:
    """The method of a text such as ``diloco.json@3.9ms/50``: a plan, a time, and maybe the number
    of steps from one use of its conditional collectives to the next. Its name is the file's.

    Raises:
        UsageError: the text is not of this form, or the plan cannot be read.
    """
    path, _, rest = text.rpartition("@")
    time, _, every = rest.partition("/")
    try:
        seconds, steps = _quantity(time, _SECONDS), int(every or 1)
        if not path or steps < 1:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--methods={text}: give PLAN@TIME ({', '.join(_SECONDS)}) or PLAN@TIME/STEPS, e.g. "
            "diloco.json@3.9ms/50"
        ) from None
    return Method(Path(path).stem, _read_plan(path), seconds, steps)


def _read_plan(path: str) -> Plan:
    content = link.read_json(path)
    try:
        return from_json(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def packs_of_plan(path: str) -> tuple[Pack, ...]:
    """The packs of the gradients in a plan's file, in order.

    Raises:
        UsageError: the file cannot be read or is no plan, the size of a pack is unknown, or the
            gradients are gathered, not summed.
    """
    packs = []
    for collective in _read_plan(path).collectives:
        if collective.bytes is None:
            raise UsageError(f"{path}: the size of {collective.name} is unknown: give --packs")
        if collective.kind in GATHERS:
            raise UsageError(f"{path}: {collective.name} is gathered: give --methods={path}@TIME")
        share = 1.0 if collective.full_share is None else collective.full_share
        packs.append(Pack(collective.bytes, share))
    return tuple(packs)


def read_network() -> Network:
    """The network that the flags describe.

    Raises:
        UsageError: a link is missing or malformed, or the topology is unknown.
    """
    kind, _, count = FLAGS.topology.partition(":")
    if (kind, count) not in (("flat", ""), ("shared", "")) and (
        kind != "hosts" or not count.isdigit() or not 0 < int(count) <= _MOST_REPLICAS
    ):
        raise UsageError(f"--topology={FLAGS.topology}: choose flat, shared or hosts:N")
    if bool(FLAGS.outer) == bool(FLAGS.link):
        raise UsageError("give either --outer=LATENCY,BANDWIDTH or --link=FILE")
    shared = kind == "shared"
    if FLAGS.link:
        outer = cost.link_of(link.read(FLAGS.link), shared=shared)
    else:
        outer = dataclasses.replace(parse_link("--outer", FLAGS.outer), shared=shared)
    inner = parse_link("--inner", FLAGS.inner) if FLAGS.inner else None
    return Network(outer, inner, int(count) if kind == "hosts" else 1)


def parse_link(flag: str, text: str) -> Link:
    """The link of a text such as ``5us,50GB/s``, the value of ``flag``.

    Raises:
        UsageError: the text is not of this form.
    """
    latency, _, rate = text.partition(",")
    try:
        alpha, beta = _quantity(latency, _SECONDS), _quantity(rate, _RATES)
        if beta <= 0:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"{flag}={text}: give latency ({', '.join(_SECONDS)}) and bandwidth "
            f"({', '.join(_RATES)}), e.g. 5us,50GB/s"
        ) from None
    return Link(alpha, beta)


def parse_pack(text: str) -> Pack:
    """The pack of a text such as ``25MiB@0.5``: size, and share of the backward pass (default 1).

    Raises:
        UsageError: the text is not of this form.
    """
    size, _, share = text.partition("@")
    try:
        pack = Pack(_quantity(size, _SIZES), float(share or 1))
        if not 0 <= pack.ready <= 1:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--packs={text}: give SIZE ({', '.join(_SIZES)}) and the share of the backward pass "
            "before it, e.g. 25MiB@0.5"
        ) from None
    return pack


def _quantity(text: str, units: Mapping[str, float]) -> float:
    """The value of a number with one of ``units``; raises ValueError for any other text."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z/]+)", text.strip())
    if not found or found[2] not in units:
        raise ValueError(text)
    return float(found[1]) * units[found[2]]


def read_replicas(texts: list[str] | None) -> list[int]:
    """Numbers of replicas, ascending; `DEFAULT_REPLICAS` for None.

    Raises:
        UsageError: there is none, or a text is not a number in range.
    """
    if texts is None:
        return DEFAULT_REPLICAS
    if not texts:
        raise UsageError("--replicas is empty: give numbers, e.g. 2,4,8")
    for text in texts:
        if not text.isdigit() or not 1 <= int(text) <= _MOST_REPLICAS:
            raise UsageError(f"--replicas: {text!r} is not a number from 1 to {_MOST_REPLICAS:,}")
    return sorted(set(map(int, texts)))


def table(step: Step, network: Network, curves: dict[str, list[Prediction]]) -> str:
    """The predictions as text: a line for each number of replicas, in milliseconds and percent."""
    lines = [describe(step, network), ""]
    lines.append(" " * 9 + "".join(f"{name:>36}" for name in curves))
    head = f"{'step ms':>12}{'exposed ms':>12}{'efficiency':>12}"
    lines.append(f"{'replicas':>9}" + head * len(curves))
    for row in zip(*curves.values(), strict=True):
        cells = "".join(
            f"{p.step * 1e3:12.3f}{p.exposed * 1e3:12.3f}{p.efficiency:12.1%}" for p in row
        )
        lines.append(f"{row[0].replicas:>9,}{cells}")
    return "\n".join(lines)


def describe(step: Step, network: Network) -> str:
    """The step and the network in two lines of text."""
    return (
        f"one replica: {step.alone * 1e3:.3f} ms (forward {step.forward * 1e3:.3f}, backward "
        f"{step.backward * 1e3:.3f}, apply {step.apply * 1e3:.3f}, other {step.other * 1e3:.3f}), "
        f"{step.bytes / MIB:.2f} MiB in {len(step.packs)} packs\n{_describe_network(network)}"
    )


def _describe_network(network: Network) -> str:
    kind = "all replicas share one link" if network.outer.shared else "a link for each replica"
    if network.per_host > 1:
        assert network.inner is not None  # checked by Network
        kind = f"{network.per_host} replicas on a host ({_shown(network.inner)}), a link each"
    return f"network: {kind}: {_shown(network.outer)}"


def _shown(one: Link) -> str:
    return f"{one.alpha * 1e6:.1f} us, {one.beta / 1e9:.2f} GB/s"


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps({"schema": 1, **content}, default=dataclasses.asdict))


def _plot(step: Step, network: Network, curves: dict[str, list[Prediction]]) -> None:
    from ctl.inspect.predict.efficiency import draw

    scaling = "strong" if FLAGS.strong else "weak"
    size = f"{step.bytes / MIB:.3g} MiB of gradients in all"
    notes = f"one replica: {step.alone * 1e3:.3g} ms, {size}", _describe_network(network)
    title = f"Predicted efficiency, {scaling} scaling"
    console.write_file("plot", FLAGS.plot, draw(curves, title, notes))
