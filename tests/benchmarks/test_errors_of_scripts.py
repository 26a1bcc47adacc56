"""An error that a user of a benchmark makes is one line."""

from __future__ import annotations

import pytest
from scripts import run

pytestmark = pytest.mark.slow  # starts processes


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("all_reduce", "--operations=ringg", "unknown operation 'ringg'"),
        ("all_reduce", "--strategy=multi_worker --operations=hierarchical_copy", "nccl, ring"),
        ("all_reduce", "--max_bytes=100", "--max_bytes=100 is below --min_bytes=1024"),
        ("checkpoint", "--megabytes=1,x", "--megabytes=x: must be a positive number"),
        ("gpu", "--what=speed", "unknown --what 'speed'"),
        ("input_pipeline", "--pipelines=ctl", "--pipelines must include tutorial"),
        ("input_pipeline", "--replicas=3", "is not divisible by 3 replicas"),
        ("long_run", "--steps=1234", "--steps must be divisible by 1000"),
        ("model_size", "--variables=4,x", "whole numbers of 1 or more"),
        ("model_size", "--plain --replicas=2", "--plain needs one replica"),
        ("scaling", "--counts=2,3", "with 1 and 2 among them"),
        ("scaling", "--counts=1,2,5", "--batch=192 is not divisible by 5"),
        ("scaling", "--mbit=5 --strategy=mirrored", "--mbit must be above 0, and needs"),
        ("startup", "--what=helpp", "unknown --what 'helpp'"),
        ("step_time", "--variants=plane", "unknown variant 'plane'"),
        ("step_time", "--variants=ctl", "--reference=plain is not among --variants"),
        ("step_time", "--model=denze", "did you mean 'dense'?"),
        ("step_time", "--replicas=0", "--replicas=0: must be a whole number of 1 or more"),
        ("step_time", "--replicas=3", "--global_batch_size=64 is not divisible by 3 replicas"),
        ("time_to_accuracy", "--dataset=mnits", "unknown dataset 'mnits'"),
        ("time_to_accuracy", "--variants=keras", "unknown variant 'keras'"),
        (
            "why_not_fit",
            "--claims=clippping",
            "unknown claim 'clippping': the choices are clipping, ",
        ),
    ],
)
def test_a_wrong_flag_is_one_line(script, arguments, says):
    done = run(f"{script}.py {arguments}", exit_code=2)
    assert says in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("argument", "code", "says"),
    [
        ("--timeout=0.01", 1, "plain: no answer in 0.01 s"),
        ("--model=no_where:model", 2, "cannot import the model 'no_where:model'"),
    ],
)
def test_a_peer_that_fails_is_one_line(argument, code, says):
    done = run(f"step_time.py --variants=plain {argument}", exit_code=code)
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
