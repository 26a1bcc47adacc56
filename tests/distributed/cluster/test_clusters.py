"""The example files for clusters, as far as they can be run without one: what the cluster's part
would do is done here, the commands in them run as they are."""

from __future__ import annotations

import copy
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launchers import Launcher, fake_worker, launchers, until

import ctl
from ctl import launch
from ctl.errors import DivergedError, PeerError, Preempted, UsageError

FILES = Path(ctl.__file__).parent / "distributed/cluster/examples"
SLURM = FILES / "slurm.sh"
SHORT = [
    *("--dataset=synthetic", "--image_shape=4,4,1", "--num_examples=640", "--model=dense"),
    *("--train_steps=10", "--noexport", "--notensorboard"),
]

# What srun does: the tasks with their variables; the highest exit code.
_SRUN = """
import os, subprocess, sys
options, command = sys.argv[1:4], sys.argv[4:]
assert options == ["--distribution=block", "--kill-on-bad-exit=0", "--wait=60"], options
step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
step |= {"SLURM_STEP_NODELIST": "localhost", "SLURMD_NODENAME": "localhost"}
tasks = [
    subprocess.Popen(command, env={**os.environ, **step, "SLURM_PROCID": str(rank)})
    for rank in range(2)
]
sys.exit(max(task.wait() % 256 for task in tasks))
"""

# Parses the flags of a command and says what came of --strategy and of the cluster.
_PARSE = """
import sys
from absl import flags
from ctl import cluster, train
train.run_command = lambda *_, **__: flags.FLAGS(sys.argv)
train.run()
assert flags.FLAGS.strategy == "multi_worker"
found = cluster.resolve(flags.FLAGS.workers, flags.FLAGS.worker_index)
print(*found.workers, found.index, found.source)
"""


@pytest.mark.slow
def test_the_elastic_job_of_slurm_loses_a_task(tmp_path):
    """In place of Python for the training, a worker that does not train."""
    srun = tmp_path / "srun"
    srun.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        "assert sys.argv[1:4] == ['--no-kill', '--kill-on-bad-exit=0', '--wait=0'], sys.argv\n"
        "tasks = [subprocess.Popen(sys.argv[4:]) for _ in range(3)]\n"
        "sys.exit(max(task.wait() % 256 for task in tasks))\n"
    )
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/bash\nif [[ $2 == ctl.launch ]]; then\n"
        f'    exec {sys.executable} "${{@:1:2}}" --last_call=2 "${{@:3}}"\nfi\n'
        f"exec {shlex.join(fake_worker(tmp_path))}\n"
    )
    for program in (srun, python):
        program.chmod(stat.S_IRWXU)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(python)}
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}
    script = ["env", *(f"{k}={v}" for k, v in (environ | job).items()), "bash"]
    script += [str(FILES / "slurm_elastic.sh"), str(tmp_path / "run"), "--train_steps=10"]
    job = Launcher(script)
    try:
        until(lambda: job.sizes() == [3, 3, 3])
        os.kill(job.attempts()[0][2], signal.SIGKILL)
        until(lambda: job.sizes() == [3, 3, 3, 2, 2])
        (tmp_path / "end").touch()
        assert job.code() == 0
        assert (tmp_path / "run/rendezvous/7-0").is_dir()
    finally:
        job.process.kill()
        job.process.wait()


@pytest.fixture
def slurm(tmp_path):
    """``slurm(python, *arguments, **environ)``: what sbatch does, with commands of Slurm beside."""
    directory = tmp_path / "bin"
    directory.mkdir()
    commands = {
        "srun": f"#!{sys.executable}\n{_SRUN}",
        "scontrol": f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol\n',
    }
    for name, text in commands.items():
        (directory / name).write_text(text)
        (directory / name).chmod(stat.S_IRWXU)

    def run(python: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess:
        path = f"{directory}:{os.environ['PATH']}"
        environ = {"PATH": path, "PYTHON": python, "SLURM_JOB_ID": "7", **environ}
        return subprocess.run(
            ["bash", SLURM, *arguments],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


@pytest.mark.slow
def test_slurm_gives_each_task_its_place(slurm, tmp_path):
    """In place of Python, one that parses the flags and trains nothing."""
    assert subprocess.run(["bash", "-n", SLURM]).returncode == 0
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\n[[ "$1 $2" == "-m ctl.train" ]] || exit 1\n'
        f'exec {sys.executable} -c {shlex.quote(_PARSE)} "${{@:3}}" >{tmp_path}/$SLURM_PROCID\n'
    )
    python.chmod(stat.S_IRWXU)
    ended = slurm(str(python), f"--model_dir={tmp_path}/run", SLURM_JOB_ID="8")
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        said = (tmp_path / str(rank)).read_text()
        assert said == f"localhost:10080 localhost:10081 {rank} Slurm\n"
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [
        (Preempted.exit_code, 50, True),
        (PeerError.exit_code, 2, True),
        (PeerError.exit_code, 3, False),
        (137, 0, True),
        (UsageError.exit_code, 0, False),
        (DivergedError.exit_code, 0, False),
    ],
)
def test_slurm_requeues(slurm, tmp_path, code, restarts, requeued):
    """In place of Python, a command that exits with ``code``."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho $CTL_JOB_SECRET\nexit {code}\n")
    program.chmod(stat.S_IRWXU)
    ended = slurm(str(program), SLURM_RESTART_COUNT=str(restarts))
    assert ended.returncode == code
    first, second = ended.stdout.split()  # of the two tasks
    assert first == second and len(first) == 32
    assert (tmp_path / "scontrol").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol").read_text() == "requeue 7\n"


def documents(name: str) -> dict[str, dict]:
    with open(FILES / name, encoding="utf-8") as file:
        return {document["kind"]: document for document in yaml.safe_load_all(file)}


def test_the_manifests_are_of_the_published_schemas():
    """Strictly: fields that Kubernetes does not know are errors, too. Before 1.29, the schemas want
    `onPodConditions` in each rule, which the API server does not."""
    schemas = pytest.importorskip("kubernetes_validate")
    manifests = list(documents("kubernetes_job.yaml").values())
    for version in ("1.33", schemas.latest_version()):
        for manifest in documents("kubernetes_elastic.yaml").values():
            schemas.validate(manifest, version, strict=True)
    # The schema of a TFJob is Kubeflow's; that of its pods is of Kubernetes.
    worker = only(list(documents("tfjob.yaml").values()))["spec"]["tfReplicaSpecs"]["Worker"]
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "template": worker["template"]}
    for manifest in (*manifests, pods):
        for version in ("1.29", "1.33", schemas.latest_version()):
            schemas.validate(manifest, version, strict=True)
    wrong = copy.deepcopy(manifests[-1])
    container = only(wrong["spec"]["template"]["spec"]["containers"])
    container["imagePullPolice"] = "Always"
    with pytest.raises(schemas.ValidationError, match="'imagePullPolice' was unexpected"):
        schemas.validate(wrong, schemas.latest_version(), strict=True)


def only(values: list):
    (value,) = values
    return value


def test_kubernetes_job(zygote, tmp_path):
    found = documents("kubernetes_job.yaml")
    job, service, policy = found["Job"], found["Service"], found["NetworkPolicy"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    container = only(pod["containers"])
    assert (job["apiVersion"], spec["completionMode"]) == ("batch/v1", "Indexed")

    # The names of the pods, as Kubernetes makes them, are those that the workers look for.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert labels.items() >= service["spec"]["selector"].items()
    port = only(container["ports"])["containerPort"]
    assert only(service["spec"]["ports"])["port"] == port
    name = job["metadata"]["name"]
    names = [f"{name}-{i}.{pod['subdomain']}:{port}" for i in range(spec["completions"])]
    assert spec["parallelism"] == spec["completions"] == 2
    assert f"--workers={','.join(names)}" in container["args"]

    # Only they may reach the port.
    assert labels.items() >= policy["spec"]["podSelector"]["matchLabels"].items()
    allowed = only(only(policy["spec"]["ingress"])["from"])
    assert allowed == {"podSelector": policy["spec"]["podSelector"]}

    # What each exit code leads to; a pod failure policy needs restartPolicy: Never.
    assert pod["restartPolicy"] == "Never"
    actions = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["containerName"] == container["name"]
            assert rule["onExitCodes"]["operator"] == "In"
            actions |= dict.fromkeys(rule["onExitCodes"]["values"], rule["action"])
    assert actions == {
        UsageError.exit_code: "FailJob",
        DivergedError.exit_code: "FailJob",
        Preempted.exit_code: "Ignore",
    }
    assert only(pod["volumes"])["name"] == only(container["volumeMounts"])["name"]

    # The command, as the kubelet starts it for each index; paths and length are of this test.
    words = container["command"] + container["args"]
    assert words[:3] == ["python", "-m", "ctl.train"]
    flags = [word for word in words[3:] if not word.startswith("--model_dir=")]
    for pod_name, address in zip(names, launch.cluster(2)["worker"], strict=True):
        flags = [flag.replace(pod_name, address) for flag in flags]
    commands = [
        zygote.start(
            "ctl.train",
            *(flag.replace("$(JOB_COMPLETION_INDEX)", str(index)) for flag in flags),
            *(f"--model_dir={tmp_path}", *SHORT),
        )
        for index in range(2)
    ]
    for index, command in enumerate(commands):
        assert command.wait() == 0, command.stderr[-3000:]
        assert ("done: 10 steps" in command.stdout) == (index == 0)


@pytest.mark.slow
def test_the_elastic_job_of_kubernetes_loses_a_pod(tmp_path):
    """Three of its commands, as the kubelet starts them, with workers that do not train."""
    found = documents("kubernetes_elastic.yaml")
    fixed = documents("kubernetes_job.yaml")
    assert found["Service"] == fixed["Service"] and found["NetworkPolicy"] == fixed["NetworkPolicy"]
    spec, container = found["Job"]["spec"], only(pod_of(found["Job"])["containers"])
    assert spec["podFailurePolicy"] == fixed["Job"]["spec"]["podFailurePolicy"]
    assert pod_of(found["Job"])["restartPolicy"] == "Never" and spec["backoffLimitPerIndex"]
    words = container["command"] + container["args"]
    assert words[:3] == ["python", "-m", "ctl.launch"] and "--workers=2..4" in words
    assert spec["parallelism"] == spec["completions"] == 4
    options = words[3 : words.index("--")]
    training = words[words.index("--") + 1 :]
    assert training == ["python", "-m", "ctl.train", "--strategy=multi_worker", training[-1]]
    assert f"{training[-1]}/rendezvous" == only(of("rendezvous", options)).replace(
        "--rendezvous", "--model_dir"
    )
    port = only(container["ports"])["containerPort"]
    address = f"--address=ctl-train-$(JOB_COMPLETION_INDEX).ctl-train:{port}"
    assert of("address", options) == [address]

    changed = {of("rendezvous", options)[0]: f"--rendezvous={tmp_path}/board", address: ""}
    options = [changed.get(option, option) for option in options]
    options = [*filter(None, options), "--address=127.0.0.1", "--last_call=2"]
    command = [sys.executable, *words[1:3], *options, "--", *fake_worker(tmp_path)]
    with launchers([command] * 3) as pods:
        pods[1].process.kill()
        until(lambda: pods[0].sizes() == pods[2].sizes() == [3, 2])
        (tmp_path / "end").touch()
        assert [pod.code() for pod in (pods[0], pods[2])] == [0, 0]


def of(name: str, options: list[str]) -> list[str]:
    return [option for option in options if option.startswith(f"--{name}=")]


def pod_of(job: dict) -> dict:
    return job["spec"]["template"]["spec"]


def test_tfjob(tmp_path):
    job = only(list(documents("tfjob.yaml").values()))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "TFJob")
    worker = job["spec"]["tfReplicaSpecs"]["Worker"]
    assert list(job["spec"]["tfReplicaSpecs"]) == ["Worker"] and worker["replicas"] == 2
    assert worker["restartPolicy"] == "OnFailure"
    assert job["spec"]["successPolicy"] == "AllWorkers"
    pod = worker["template"]["spec"]
    container = only(pod["containers"])
    assert container["name"] == "tensorflow"
    assert only(container["ports"])["name"] == "tfjob-port"
    port = only(container["ports"])["containerPort"]
    assert only(pod["volumes"])["name"] == only(container["volumeMounts"])["name"]

    # What the operator puts into TF_CONFIG, in the namespace "default".
    name = job["metadata"]["name"]
    names = [f"{name}-worker-{i}.default.svc:{port}" for i in range(2)]
    for index in range(2):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": names}, "task": task, "environment": "cloud"}
        assert container["command"] == ["python", "-m", "ctl.train"]
        flags = [*container["args"], f"--model_dir={tmp_path}"]
        said = subprocess.run(
            [sys.executable, "-c", _PARSE, *flags],
            env={**os.environ, "TF_CONFIG": json.dumps(config)},
            capture_output=True,
            text=True,
        )
        assert said.stdout.split() == [*names, str(index), "TF_CONFIG"], said.stderr


HADOLINT = Path(sys.executable).with_name("hadolint")


def lint(text: str) -> subprocess.CompletedProcess:
    command = [HADOLINT, "--strict-labels", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


@pytest.mark.skipif(not HADOLINT.exists(), reason="the extra `dev` brings Hadolint")
def test_the_linter_has_nothing_to_say_of_the_dockerfile():
    text = (FILES / "Dockerfile").read_text("utf-8")
    done = lint(text)
    assert done.returncode == 0 and not done.stdout, done.stdout
    assert "DL3006" in lint(text.replace("python:3.12-slim", "python")).stdout  # without a tag
    assert "DL3042" in lint(text.replace("--no-cache-dir ", "")).stdout


def test_dockerfile():
    """It is built nowhere here. It copies what `tests/test_package.py` builds a wheel of."""
    lines = (FILES / "Dockerfile").read_text("utf-8").splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and line[0].isupper()]
    copied = [name for key, rest in words if key == "COPY" for name in rest.split()[:-1]]
    assert copied == ["setup.py", "setup.cfg", "README.md", "LICENSE", "ctl"]
    instructions = dict(words)
    assert instructions["ENTRYPOINT"] == '["ctl-train"]'
    image = f"registry.example.com/ctl:{ctl.__version__}"
    assert f"-t {image} ." in "\n".join(lines)
    worker = documents("tfjob.yaml")["TFJob"]["spec"]["tfReplicaSpecs"]["Worker"]
    for template in (
        documents("kubernetes_job.yaml")["Job"]["spec"]["template"],
        documents("kubernetes_elastic.yaml")["Job"]["spec"]["template"],
        worker["template"],
    ):
        pod = template["spec"]
        assert only(pod["containers"])["image"] == image
        assert pod["securityContext"]["fsGroup"] == int(instructions["USER"]) != 0
