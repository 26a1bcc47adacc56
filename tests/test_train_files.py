"""Trainings on folders and files of the user's, by --dataset: what follows from them is kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from zygote import last_line

from ctl.data.datasets import clicks

pytestmark = pytest.mark.slow  # starts processes

TRAIN, EVALUATE = "ctl.train", "ctl.evaluate"


@pytest.fixture
def table(tmp_path):
    """Two classes that one column tells apart; sorted by class; of a large scale."""
    random = np.random.default_rng(0)
    wide, narrow = random.normal(size=(2, 200))
    kinds = np.repeat(["oak", "ash"], 100)
    narrow += 4 * (kinds == "oak")
    rows = [f"{1e4 * w + 1e6},{n},{kind}" for w, n, kind in zip(wide, narrow, kinds, strict=True)]
    path = tmp_path / "trees.csv"
    path.write_text("\n".join(["height,width,kind", *rows, ""]))
    return path


@pytest.mark.sample
def test_a_table(zygote, table, tmp_path):
    run = f"--model_dir={tmp_path}/run"
    command = [TRAIN, run, f"--dataset={table}", "--learning_rate=0.01", "--seed=1"]
    whole = zygote.run(*command, "--train_steps=40", "--global_batch_size=20")
    assert f"{table} has no part for the test: train[90%:] is held out" in whole.stderr
    lines = [line.split() for line in whole.stderr.splitlines()]
    assert ["kind", "label", "text,", "2", "values", "0"] in lines
    assert ["all", "180", "20"] in lines
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["flags"]["model"] == "dense" and config["data"]["classes"] == ["ash", "oak"]
    assert config["data"]["features"] == ["height", "width"]
    (result,) = (line for line in whole.stdout.splitlines() if "train[90%:]" in line)
    assert float(result.split()[-1]) > 0.9  # columns are standardized
    shown = zygote.run(EVALUATE, run, "--json").stdout
    assert json.loads(shown)["accuracy"] == pytest.approx(float(result.split()[-1]), abs=1e-4)

    other = tmp_path / "more.csv"
    other.write_text("width,kind,height\n" + "4,oak,1e6\n" * 3)  # one class, and another order
    shown = zygote.run(EVALUATE, run, f"--dataset={other}", "--json")
    assert "more.csv train, 3 examples" in shown.stderr
    assert json.loads(shown.stdout)["accuracy"] == 1
    exported = tmp_path / "run/export/model.keras"
    shown = zygote.run(EVALUATE, f"--model={exported}", f"--dataset={other}", "--json")
    assert json.loads(shown.stdout)["accuracy"] == 1  # its one class is the second
    model = tf.keras.models.load_model(exported)
    assert model(np.float32([[1e6, 0], [1e6, 4]])).numpy().argmax(1).tolist() == [0, 1]

    again = zygote.run(*command, "--train_steps=40", "--global_batch_size=20")
    assert "done: 40 steps, 0 of them now" in again.stdout
    table.write_text(table.read_text().replace("oak", "elm"))
    again = zygote.run(*command, "--train_steps=40", "--global_batch_size=20", exit_code=2)
    says = 'the classes were ["ash", "oak"], and are ["ash", "elm"]'
    assert says in last_line(again)
    table.write_text(table.read_text().replace("elm", "oak").replace("\n1", "\n2"))
    again = zygote.run(*command, "--train_steps=40", "--global_batch_size=20", exit_code=4)
    assert "is from another run: content was" in last_line(again)


def test_numbers_to_predict(zygote, table, tmp_path):
    command = [TRAIN, f"--model_dir={tmp_path}/run", f"--dataset={table}", "--labels=height"]
    refused = zygote.run(*command, exit_code=2)
    assert "--loss=mean_squared_error" in last_line(refused)
    options = ["--features=width", "--loss=mean_squared_error", "--train_steps=4", "--keep_best=1"]
    done = zygote.run(*command, *options).stdout  # without an accuracy, the best loss is best
    assert "train[80%:90%]" in done and "train[90%:]" in done


def test_click_data(zygote, tmp_path):
    """Text and TFRecord train the same bits, also over a resume; AUC and log loss are shown."""
    for suffix in (".txt", ".tfrecord"):
        clicks.write(tmp_path / f"train{suffix}", 0, 4000)
    sizes = ["--table_rows=100", "--embedding_dim=4", "--bottom_units=8", "--top_units=16"]
    options = [*sizes, "--schedule=constant", "--optimizer=adagrad", "--learning_rate=0.05"]
    options += ["--global_batch_size=60", "--seed=1"]

    def train(name, suffix, steps):
        run = tmp_path / name
        command = [TRAIN, f"--model_dir={run}", f"--dataset={tmp_path}/train{suffix}", *options]
        done = zygote.run(*command, f"--train_steps={steps}")
        (data,) = (run / "checkpoints" / f"step-{steps:010}").glob("variables.data*")
        return done.stdout, data.read_bytes()

    shown, whole = train("whole", ".txt", 120)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())["flags"]
    chosen = [config[name] for name in ("model", "loss", "metrics")]
    assert chosen == ["dlrm", "binary_cross_entropy", "auc"]
    (result,) = (line.split() for line in shown.splitlines() if "train[90%:]" in line)
    assert result[1::2] == ["loss", "auc"] and float(result[4]) > 0.6
    evaluated = json.loads(zygote.run(EVALUATE, f"--model_dir={tmp_path}/whole", "--json").stdout)
    assert evaluated["auc"] == pytest.approx(float(result[4]), abs=1e-4)
    exported = f"--model={tmp_path}/whole/export/model.keras"
    again = zygote.run(EVALUATE, exported, f"--dataset={tmp_path}/train.tfrecord", "--json")
    assert "train.tfrecord train, 4000 examples" in again.stderr
    assert json.loads(again.stdout)["auc"] > 0.6
    train("resumed", ".tfrecord", 37)
    assert train("resumed", ".tfrecord", 120)[1] == whole


def test_a_folder_of_images(zygote, tmp_path):
    for kind, level in (("dark", 20), ("light", 200)):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(20):
            image = np.full([8, 8, 3], level + number, np.uint8)
            file = tmp_path / "photos" / kind / f"{number}.png"
            file.write_bytes(tf.io.encode_png(image).numpy())
    run = f"--model_dir={tmp_path}/run"
    command = [TRAIN, run, f"--dataset={tmp_path}/photos", "--global_batch_size=8"]
    command += ["--train_steps=8", "--learning_rate=0.01", "--augment=flip"]
    resident = zygote.run(*command)
    assert "photos train[:90%], 36 examples, 0.0 MiB resident" in resident.stderr
    shown = zygote.run(EVALUATE, run, f"--report={tmp_path}/report")
    assert [line.split()[:2] for line in shown.stdout.splitlines() if line[:4] in ("dark", "ligh")]
    assert "light" in (tmp_path / "report" / "report.html").read_text()
    command[1] = f"--model_dir={tmp_path}/streamed"
    streamed = zygote.run(*command, "--resident_limit_mib=0", "--replicas=2")
    assert "36 examples, streamed" in streamed.stderr
