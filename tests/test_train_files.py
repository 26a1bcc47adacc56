"""Trainings on folders and files of the user's, by --dataset: what follows from them is kept."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import tensorflow as tf
from zygote import last_line

from ctl.checkpoint import Reader
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
    wrong = ["--features=width", "--labels=height"]
    refused = zygote.run(EVALUATE, run, f"--dataset={other}", *wrong, exit_code=2)
    says = "--features=width has no effect: the model was trained with the features height, width"
    assert last_line(refused).startswith(says)
    same = ["--features=height,width", "--labels=kind"]
    shown = zygote.run(EVALUATE, run, f"--dataset={other}", *same, "--json")
    assert json.loads(shown.stdout)["accuracy"] == 1
    other.write_text("width,height\n4,1e6\n0,1e6\n")  # no classes
    out, report = f"--predictions={tmp_path}/out.csv", f"--report={tmp_path}"
    zygote.run(EVALUATE, run, f"--dataset={other}", out)
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert [line.rpartition(",")[0] for line in lines] == ["row,kind", "0,oak", "1,ash"]
    refused = zygote.run(EVALUATE, run, f"--dataset={other}", out, report, exit_code=2)
    assert last_line(refused) == f"--report needs labels, and {other} has none: leave it out"

    again = zygote.run(*command, "--train_steps=40", "--global_batch_size=20")
    assert "done: 40 steps, 0 of them now" in again.stdout
    table.write_text(table.read_text().replace("oak", "elm"))
    again = zygote.run(*command, "--train_steps=40", "--global_batch_size=20", exit_code=2)
    says = 'the classes were ["ash", "oak"], and are ["ash", "elm"]'
    assert says in last_line(again)
    table.write_text(table.read_text().replace("elm", "oak").replace("\n1", "\n2"))
    again = zygote.run(*command, "--train_steps=40", "--global_batch_size=20", exit_code=4)
    says = (
        f"another run: the content of {table.name} has changed since then; use the same flags and"
    )
    assert says in last_line(again)


def encoded(found: dict, row: dict[str, str]) -> list[float]:
    """What an exported model takes, by its ``training_data.json``."""
    numbers: list[float] = []
    for name in found["features"]:
        if name in found["words"]:
            numbers += [float(row[name] == word) for word in found["words"][name]]
        else:
            numbers.append(float(row[name] or found["missing"][name]))
    return numbers


def test_a_table_with_words_and_missing_values(zygote, tmp_path):
    """The flags that a message names work; evaluation, a resume and the export have the words and
    the means of the training, on one and on two replicas."""
    random = np.random.default_rng(0)
    lines = ["name,sex,age,port,survived"]
    for n in range(120):
        sex = random.choice(["male", "female"])
        age = "" if n % 5 == 0 else f"{random.integers(1, 280) / 4:g}"
        port = "" if n == 7 else random.choice(["C", "Q", "S"])
        lines.append(f"Mr. {n},{sex},{age},{port},{int(sex == 'female')}")
    path = tmp_path / "people.csv"
    path.write_text("\n".join([*lines, ""]))
    options = ["--global_batch_size=20", "--learning_rate=0.03", "--schedule=constant"]

    def train(name, steps, *flags, **kwargs):
        run = tmp_path / name
        command = [TRAIN, f"--model_dir={run}", f"--dataset={path}", *options, *flags]
        return zygote.run(*command, f"--train_steps={steps}", **kwargs)

    refused = train("whole", 30, exit_code=2)
    assert "'age' has no value, as in 24 of 120 rows: add --missing=mean" in last_line(refused)
    (hint,) = (line for line in refused.stderr.splitlines() if "text is left out" in line)
    flags = [hint.partition("give them: ")[2], "--missing=mean"]
    assert flags[0] == "--features=sex,age,port"
    whole = train("whole", 30, *flags)
    found = json.loads((tmp_path / "whole" / "config.json").read_text())["data"]
    assert found["words"] == {"sex": ["female", "male"], "port": ["C", "Q", "S"]}
    rows = list(csv.DictReader(lines))
    chosen = np.random.RandomState(0).permutation(120)[:108]
    ages = [float(rows[n]["age"]) for n in chosen if rows[n]["age"]]
    assert found["missing"] == {"sex": "", "age": math.fsum(ages) / len(ages), "port": ""}
    assert any(line.split()[:2] == ["port", "one-hot"] for line in whole.stderr.splitlines())

    (result,) = (line.split() for line in whole.stdout.splitlines() if "train[90%:]" in line)
    assert float(result[-1]) == 1
    run = f"--model_dir={tmp_path}/whole"
    shown = json.loads(zygote.run(EVALUATE, run, "--json").stdout)
    assert shown["loss"] == pytest.approx(float(result[2]), abs=1e-4)
    other = tmp_path / "more.csv"
    other.write_text("port,survived,age,sex\nX,1,,female\nS,0,30,male\n,1,,female\n")
    exported = tmp_path / "whole/export/model.keras"
    for which in (run, f"--model={exported}"):  # the age is filled by the mean of the training
        shown = zygote.run(EVALUATE, which, f"--dataset={other}", "--json")
        assert json.loads(shown.stdout)["accuracy"] == 1
        assert (
            "1 of 3 values of port are words that the training examples do not have" in shown.stderr
        )
    model = tf.keras.models.load_model(exported)
    kept = json.loads((exported.parent / "training_data.json").read_text())
    assert {**kept, "examples": 0} == {**found, "examples": 0}
    table = np.float32([encoded(kept, row) for row in rows])
    held = np.setdiff1d(np.arange(120), chosen)
    labels = np.array([int(rows[n]["survived"]) for n in held])
    logits = tf.constant(model(table[held]))
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    assert float(tf.reduce_mean(loss)) == pytest.approx(float(result[2]), abs=1e-4)

    train("resumed", 13, *flags, "--noexport")
    train("resumed", 30, *flags, "--noexport")
    train("two", 30, *flags, "--noexport", "--replicas=2")
    weights = {}
    for name in ("whole", "resumed", "two"):
        reader = Reader(tmp_path / name)
        weights[name] = {key: reader[key] for key in reader.tensors if key.startswith("model/")}
    for key, value in weights["whole"].items():
        np.testing.assert_array_equal(weights["resumed"][key], value)
        np.testing.assert_allclose(weights["two"][key], value, rtol=1e-4, atol=1e-6)
    again = train("whole", 30, *flags[:1], "--missing=drop", exit_code=2)
    assert '--missing was "mean", is "drop"' in last_line(again)


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

    def train(name, suffix, steps, *flags):
        run = tmp_path / name
        command = [TRAIN, f"--model_dir={run}", f"--dataset={tmp_path}/train{suffix}", *options]
        command += flags
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
    train("resumed", ".tfrecord", 37, "--noexport")
    assert train("resumed", ".tfrecord", 120, "--noexport")[1] == whole


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
    streamed = zygote.run(*command, "--resident_limit_mib=0", "--replicas=2", "--noexport")
    assert "36 examples, streamed" in streamed.stderr


def test_predictions_for_files_without_labels(zygote, tmp_path):
    """On one and on two replicas, of a checkpoint and of an export, with metrics where there are
    labels."""
    random = np.random.default_rng(0)
    numbers = random.normal(size=(120, 2))
    lines = [f"{x},{z},{2 * x - z}" for x, z in numbers]
    (tmp_path / "train.csv").write_text("\n".join(["x,z,price", *lines, ""]))
    (tmp_path / "new.csv").write_text("\n".join(["z,x", *(f"{z},{x}" for x, z in numbers), ""]))
    run, out = f"--model_dir={tmp_path}/run", tmp_path / "out.csv"
    options = ["--labels=price", "--loss=mean_squared_error", "--train_steps=100"]
    options += ["--global_batch_size=32", "--model=dense"]
    zygote.run(TRAIN, run, f"--dataset={tmp_path}/train.csv", *options)
    model = tf.keras.models.load_model(tmp_path / "run/export/model.keras")
    expected = model(numbers.astype("float32")).numpy()[:, 0]
    new, to = f"--dataset={tmp_path}/new.csv", f"--predictions={out}"
    refused = zygote.run(EVALUATE, run, new, exit_code=2)
    assert "without labels, give ctl.evaluate --predictions=FILE.csv" in last_line(refused)
    refused = zygote.run(EVALUATE, run, new, "--predictions=out.txt", exit_code=2)
    assert "give a file that ends in .csv" in last_line(refused)
    exported = f"--model={tmp_path}/run/export/model.keras", "--loss=mean_squared_error"
    for which in ([run], [run, "--replicas=2", "--global_batch_size=50"], exported):
        shown = zygote.run(EVALUATE, *which, new, to)
        assert last_line(shown) == f"predictions: {out}"
        assert "no labels, so no metrics" in shown.stdout
        rows = list(csv.DictReader(out.open()))
        assert [row["row"] for row in rows] == [*map(str, range(120))]
        found = [float(row["price"]) for row in rows]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    shown = zygote.run(EVALUATE, run, "--eval_split=train", to, "--json")
    loss = np.mean((expected - (2 * numbers[:, 0] - numbers[:, 1])) ** 2)
    assert json.loads(shown.stdout)["loss"] == pytest.approx(loss, rel=1e-3)
    assert [row["price"] for row in csv.DictReader(out.open())] == [row["price"] for row in rows]
    assert "held out" not in shown.stderr
    shown = zygote.run(EVALUATE, run, to)
    assert "of train[90%:] alone, which the training held out: for all rows, give" in shown.stderr
    assert len([*csv.DictReader(out.open())]) == 12
