from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
import tiny_tfds
from batches import seen
from tensorflow.python.framework import kernels

from ctl.data import (
    GlobalBatches,
    InMemory,
    Splits,
    Streaming,
    as_dataset,
    load,
    selection_splits,
    synthetic,
)
from ctl.data.feed import distribute
from ctl.data.global_batches import comparable
from ctl.data.load import check_apart
from ctl.errors import UsageError


def numbered(count: int, **kwargs) -> InMemory:
    """Images whose first byte, and labels that, are their number."""
    images = np.random.default_rng(0).integers(256, size=(count, 5, 3, 1), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(count) % 256
    return InMemory((images, np.arange(count)), **kwargs)


def take(dataset, start: int, count: int) -> np.ndarray:
    return np.stack(list(dataset.batches(start).take(count).as_numpy_iterator()))


def test_every_epoch_has_every_example_once():
    dataset = numbered(101, global_batch_size=12, seed=3)
    epochs = take(dataset, 0, 101).reshape(12, 101)  # 101 batches of 12 are 12 epochs of 101
    for epoch in epochs:
        assert sorted(epoch) == list(range(101))
    assert all((a != b).any() for a, b in itertools.combinations(epochs, 2))


@pytest.mark.parametrize(("count", "batch"), [(101, 12), (96, 12), (12, 12), (13, 12), (5, 1)])
def test_a_late_start_continues_the_same_sequence(count, batch):
    dataset = numbered(count, global_batch_size=batch, seed=3)
    whole = take(dataset, 0, 57)
    for start in (1, 7, 8, 9, 37):
        np.testing.assert_array_equal(take(dataset, start, 20), whole[start : start + 20])


def test_a_start_after_very_many_steps():
    batches = take(numbered(100, global_batch_size=10, seed=3), 10**12, 10)
    assert sorted(batches.ravel()) == list(range(100))


@pytest.mark.parametrize("kind", [InMemory, Streaming])
def test_order_depends_on_the_seed_and_on_nothing_global(kind, mirrored):
    def first(seed: int) -> list[np.ndarray]:
        return seen(mirrored(1), kind(np.arange(101), global_batch_size=12, seed=seed), 0, 5)

    order = first(3)
    assert not np.array_equal(order, first(4))
    tf.random.set_seed(99)
    np.testing.assert_array_equal(order, first(3))


def test_training_batches_are_endless_and_static():
    batches = numbered(101, global_batch_size=12).batches()
    assert batches.cardinality() == tf.data.INFINITE_CARDINALITY
    assert batches.element_spec == tf.TensorSpec([12], tf.int64)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_global_batches_are_the_same_under_any_number_of_replicas(mirrored, replicas):
    dataset = numbered(101, global_batch_size=12, seed=3)
    images, labels = dataset.arrays
    for start in (0, 37):
        expected = [(images[rows], labels[rows]) for rows in take(dataset, start, 20)]
        found = seen(mirrored(replicas), dataset, start, 20)
        tf.nest.map_structure(np.testing.assert_array_equal, found, expected)
    share = tf.TensorSpec([12 // replicas], tf.int64)
    on_replica = tf.function(dataset.on_replica).get_concrete_function
    image, label = on_replica(share, dataset.resident(mirrored(1))).structured_outputs
    assert (image.shape, label.shape) == ((12 // replicas, 5, 3, 1), (12 // replicas,))


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("count", [101, 98, 97, 96, 5, 1])
def test_evaluation_has_every_example_once_and_in_order(mirrored, replicas, count):
    strategy = mirrored(replicas)
    dataset = numbered(count, global_batch_size=12, training=False)
    batches = dataset.batches()
    assert batches.cardinality() == -(-count // 12)
    seen = []
    for element in distribute(strategy, batches):
        for part in strategy.experimental_local_results(element):
            seen.extend(part.numpy())
    assert seen == list(range(count))


@pytest.mark.parametrize("replicas", [2, 4])
def test_one_copy_of_the_arrays_on_every_device(mirrored, replicas):
    images, labels = numbered(101, global_batch_size=12).resident(mirrored(replicas))
    for array in (images, labels):
        devices = [value.device for value in mirrored(replicas).experimental_local_results(array)]
        assert [device.rsplit("/", 1)[1] for device in devices] == [
            f"device:CPU:{i}" for i in range(replicas)
        ]


@pytest.mark.parametrize(
    "dtype",
    [np.uint8, np.int8, np.uint16, np.int16, np.int32, np.uint32, np.int64, np.uint64]
    + [np.float16, np.float32, np.float64, np.bool_, ">u2", ">i4", ">f4", ">i8"],
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 2, 2)])
def test_arrays_of_any_dtype_come_back_as_they_are(dtype, shape, mirrored):
    random = np.random.default_rng(0)
    array = random.integers(0, 2**16, size=(11, *shape)).astype(dtype)
    dataset = InMemory({"x": array, "y": [array]}, global_batch_size=4)
    resident = dataset.resident(mirrored(1))
    batch = dataset.on_replica(tf.constant([10, 0, 3], tf.int64), resident)
    np.testing.assert_array_equal(batch["x"], array[[10, 0, 3]])
    np.testing.assert_array_equal(batch["y"][0], array[[10, 0, 3]])
    assert batch["x"].dtype == array.dtype.newbyteorder("=") and batch["x"].shape == (3, *shape)


def test_gathering_runs_on_a_gpu():
    """No op between the indices and the batch lacks a GPU kernel: such an op would copy all of the
    data to the host at every step."""
    dataset = numbered(101, global_batch_size=12)
    resident = dataset.resident(tf.distribute.get_strategy())
    graph = tf.function(dataset.on_replica).get_concrete_function(
        tf.TensorSpec([12], tf.int64), resident
    )
    registered = kernels.get_registered_kernels_for_op("GatherV2").kernel
    if not any(kernel.device_type == "GPU" for kernel in registered):
        pytest.skip("this TensorFlow has no GPU kernels")
    checked = 0
    for op in graph.graph.get_operations():
        if op.type in ("Placeholder", "Const", "Identity", "NoOp"):
            continue
        checked += 1
        on_gpu = [
            kernel
            for kernel in kernels.get_registered_kernels_for_op(op.type).kernel
            if kernel.device_type == "GPU"
            and all(
                op.get_attr(constraint.name).as_datatype_enum in constraint.allowed_values.list.type
                for constraint in kernel.constraint
            )
        ]
        assert on_gpu, f"{op.type} of {[t.dtype for t in op.inputs]}"
    assert checked >= 3


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ((np.zeros((3, 2)), np.zeros(4)), r"\(3, 2\), \(4,\)"),
        ((np.zeros(3), np.float32(1)), "equal leading dimensions"),
        (np.zeros((0, 2)), "no examples"),
    ],
)
def test_arrays_that_are_no_dataset(arrays, says):
    with pytest.raises(UsageError, match=says):
        InMemory(arrays, global_batch_size=1)


def test_a_batch_larger_than_the_data_is_for_evaluation_only():
    with pytest.raises(
        UsageError, match="12 is larger than the dataset, which has 11 examples: give"
    ):
        numbered(11, global_batch_size=12)
    assert take(numbered(11, global_batch_size=12, training=False), 0, 1).shape == (1, 11)
    with pytest.raises(UsageError, match="at least 1"):
        numbered(11, global_batch_size=0)


def test_fingerprint_tells_content_and_order():
    base = numbered(20, global_batch_size=4, seed=1).fingerprint()
    assert base == numbered(20, global_batch_size=4, seed=1).fingerprint()
    changed = numbered(20, global_batch_size=4, seed=1)
    changed.arrays[0][13, 4, 2, 0] ^= 1
    assert changed.fingerprint()["content"] != base["content"]
    assert numbered(20, global_batch_size=5, seed=1).fingerprint() != base
    assert numbered(20, global_batch_size=4, seed=2).fingerprint() != base
    assert {"name", "version", "split", "num_examples", "tensorflow"} <= base.keys()


def test_synthetic_is_the_same_for_the_same_seed():
    first, again = (synthetic((8, 9, 3), 7, 50, global_batch_size=5, seed=2) for _ in range(2))
    images, labels = first.arrays
    assert images.shape == (50, 8, 9, 3) and images.dtype == np.uint8
    assert labels.dtype == np.int64 and set(labels) == set(range(7))
    assert first.info.num_classes == 7 and first.info.image_shape == (8, 9, 3)
    assert first.fingerprint() == again.fingerprint()
    other = synthetic((8, 9, 3), 7, 50, global_batch_size=5, seed=2, training=False)
    assert (other.arrays[0] != images).any()


def test_your_own_tf_data_is_endless_to_train_and_skipped_to_resume():
    own = tf.data.Dataset.range(10).batch(4, drop_remainder=True)
    dataset = as_dataset(own)
    assert isinstance(dataset, GlobalBatches) and dataset.global_batch_size == 4
    assert dataset.batches().cardinality() == tf.data.INFINITE_CARDINALITY
    assert take(dataset, 1, 2).tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert dataset.resident(tf.distribute.get_strategy()) == ()
    assert dataset.on_replica("element", ()) == "element"
    once = as_dataset(tf.data.Dataset.range(10).batch(4), training=False)
    assert [len(batch) for batch in once.batches()] == [4, 4, 2]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda strategy, own: strategy.experimental_distribute_dataset(own), "already: give the"),
        (lambda strategy, own: iter(strategy.experimental_distribute_dataset(own)), "already: "),
        (lambda strategy, own: lambda context: own, "a function is not a dataset: call it"),
        (lambda strategy, own: iter(own), "Iterator is not a dataset: give arrays"),
    ],
    ids=["distributed", "iterator of distributed", "function", "iterator"],
)
def test_what_is_no_dataset_is_refused(given, says, mirrored):
    with pytest.raises(UsageError, match=says):
        as_dataset(given(mirrored(2), tf.data.Dataset.range(8).batch(4)))


def test_your_own_tf_data_is_not_sharded_by_file_unless_you_say_so():
    policy = tf.data.experimental.AutoShardPolicy
    for given, wanted in ((policy.AUTO, policy.DATA), (policy.FILE, policy.FILE)):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = given
        own = tf.data.Dataset.range(10).batch(4).with_options(options)
        of_batches = as_dataset(own).batches().options().experimental_distribute
        assert of_batches.auto_shard_policy == wanted


def test_a_tf_data_pipeline_is_known_by_its_seeds_and_its_first_examples():
    def known(seed=1, first=0, buffer=100):
        own = tf.data.Dataset.range(first, 100).shuffle(buffer, seed=seed).batch(10)
        return as_dataset(own.map(lambda batch: {"x": tf.strings.as_string(batch)})).fingerprint()

    assert known() == known()
    differs = [known(seed=2), known(first=1), known(buffer=50), known(seed=None), known(seed=None)]
    assert len({str(one) for one in [known(), *differs]}) == 6


def test_a_pipeline_through_which_python_looks_is_the_same_data():
    """As where one worker alone prints its batches: the workers still agree."""

    def looked_at(batch):
        seen = tf.numpy_function(lambda values: values, [batch], tf.int64)
        return tf.ensure_shape(seen, batch.shape)

    own = tf.data.Dataset.range(10).batch(4)
    assert as_dataset(own).fingerprint() == as_dataset(own.map(looked_at)).fingerprint()


@pytest.mark.parametrize("kind", ["shuffle", "cache", "map", "table"])
def test_to_compare_a_pipeline_changes_none_of_its_numbers(kind, tmp_path):
    """To read a shuffle once more changes its later epochs; so does a generator of numbers."""
    generator = tf.random.Generator.from_seed(1)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 3)

    def own():
        generator.reset_from_seed(1)
        numbers = tf.data.Dataset.range(12)
        if kind == "shuffle":
            numbers = numbers.shuffle(12, seed=1)
        elif kind == "cache":
            numbers = numbers.cache(str(tmp_path / "kept"))
        elif kind == "table":
            numbers = numbers.map(lambda n: table.lookup(tf.cast(n, tf.int32)))
        else:
            numbers = numbers.map(lambda n: n + generator.uniform([], 0, 99, tf.int64))
        return as_dataset(numbers.batch(4))

    def two_epochs(dataset):
        return [batch.numpy().tolist() for batch in dataset.batches().take(6)]

    compared = own()
    compared.fingerprint()
    found = two_epochs(compared)
    assert compared.fingerprint() == compared.fingerprint()
    assert found == two_epochs(own())


@pytest.mark.parametrize("kind", ["shuffle", "python", "table"])
def test_data_that_are_opened_again_begin_as_in_a_new_process(kind, warnings_of):
    """A shuffle takes other seeds for each reading, and each epoch."""
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 3)
    numbers = tf.data.Dataset.range(12).shuffle(12, seed=1)
    if kind == "python":
        numbers = numbers.map(lambda n: tf.numpy_function(lambda n: 2 * n, [n], tf.int64))
    elif kind == "table":
        numbers = numbers.map(lambda n: table.lookup(tf.cast(n, tf.int32)) + tf.cast(n, tf.int32))
    own = as_dataset(numbers.batch(4))
    readings = []
    for _ in range(3):
        readings.append([batch.numpy().tolist() for batch in own.batches(1).take(6)])
        own.rewind()
    assert readings[0] == readings[1] == readings[2]
    assert readings[0][2:5] != readings[0][:3] and not warnings_of()


def test_random_numbers_without_a_seed_are_named(warnings_of):
    tf.random.set_seed(None)
    numbers = tf.data.Dataset.range(9)
    cases = {
        "a shuffle without a seed": [
            numbers.shuffle(9),
            numbers.interleave(lambda n: tf.data.Dataset.range(n).shuffle(3)),
        ],
        "a random choice without a seed": [tf.data.Dataset.sample_from_datasets([numbers] * 2)],
        "random numbers without a seed in map()": [
            numbers.map(lambda n: n + tf.random.uniform([], 0, 9, tf.int64)),
            numbers.map(lambda n: tf.cond(n > 3, lambda: tf.random.normal([]), lambda: 0.0)),
        ],
    }
    for message, found in cases.items():
        for own in found:
            comparable(as_dataset(own.batch(3)))
            assert message in warnings_of()[-1]
            refused = "so loop.restore() refuses the checkpoints of this run there; start with "
            assert (refused in warnings_of()[-1]) == ("in map" not in message)
    said = len(warnings_of())
    seeded = numbers.shuffle(9, seed=1).map(lambda n: tf.random.stateless_uniform([], [1, n]))
    comparable(as_dataset(seeded.map(lambda n: tf.random.uniform([], seed=1) + n).batch(3)))
    keras.utils.set_random_seed(1)
    comparable(as_dataset(numbers.shuffle(9).batch(3)))
    assert len(warnings_of()) == said


def test_what_python_code_gives_is_not_asked_for():
    """It might wait for the training, or lack what was taken from it."""
    calls = []

    def rows():
        calls.append(1)
        yield from range(8)

    spec = tf.TensorSpec([], tf.int64)
    own = tf.data.Dataset.from_generator(rows, output_signature=spec).shuffle(4, seed=1).batch(2)
    known = comparable(as_dataset(own))()
    assert not calls and known["shuffle"] == (("shuffle", 4, 0, 1),)  # and of the test


def test_a_batch_size_that_is_not_static_is_unknown_unless_given():
    own = tf.data.Dataset.range(10).batch(4)
    assert as_dataset(own).global_batch_size is None
    assert as_dataset(own, global_batch_size=4).global_batch_size == 4


def test_data_of_an_evaluation_must_end():
    endless = tf.data.Dataset.range(6).batch(2).repeat()
    with pytest.raises(UsageError, match="never ends: leave out repeat"):
        as_dataset(endless, training=False)
    as_dataset(endless)
    as_dataset(endless.take(3), training=False)


def test_as_dataset_passes_datasets_and_refuses_others():
    dataset = numbered(20, global_batch_size=4)
    assert as_dataset(dataset) is dataset
    with pytest.raises(UsageError, match="a list is not a dataset"):
        as_dataset([1, 2])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    tfds.disable_progress_bar()
    root = str(tmp_path_factory.mktemp("tfds"))
    tiny_tfds.prepare(tiny_tfds.CtlTinyColor, root)
    return root


def test_load_takes_the_split_of_the_role(data_dir):
    train = load("ctl_tiny_color", data_dir=data_dir, global_batch_size=4)
    assert train.num_examples == 50 and train.info.split == "train"
    # There is no split "test".
    evaluation = load("ctl_tiny_color", data_dir=data_dir, global_batch_size=4, training=False)
    assert evaluation.num_examples == 7 and "validation" in evaluation.description
    part = load("ctl_tiny_color", data_dir=data_dir, global_batch_size=4, split="train[:20%]")
    assert part.num_examples == 10 and part.info.split == "train[:20%]"


@pytest.mark.parametrize(
    ("given", "common"),
    [
        (Splits(evaluation="train[80%:]"), r"10 of the 10 examples of train\[80%:\] are in train,"),
        (Splits("validation[:3]"), "3 of the 7 examples of validation are in validation"),
        (Splits("train+validation"), "7 of the 7 examples of validation are in train.validation,"),
    ],
)
def test_an_evaluation_on_examples_of_the_training_is_refused(data_dir, given, common):
    with pytest.raises(UsageError, match=f"^ctl_tiny_color: {common}.*: give both, such as --tr"):
        check_apart("ctl_tiny_color", given, data_dir)


def test_splits_that_were_chosen_to_overlap_are_warned_of(data_dir, warnings_of):
    for given in (("train[:80%]", "train[80%:]"), ("train[:9]", None), ("nothing", None)):
        check_apart("ctl_tiny_color", Splits(*given), data_dir)
    assert not warnings_of()
    check_apart("ctl_tiny_color", Splits("train", "train[:20%]"), data_dir)
    assert "10 of the 10 examples of train[:20%] are in train, too" in warnings_of()[0]


@pytest.mark.slow
def test_splits_that_select_are_not_those_that_test(data_dir):
    assert selection_splits("ctl_tiny_color", data_dir) == ("train", "validation", None)
    splits = selection_splits("fashion_mnist_mini")
    assert splits == ("train[:90%]", "train[90%:]", "test")
    options = {"global_batch_size": 64, "training": False}
    train, held_out, both = (
        load(split=split, **options).arrays for split in (splits.train, splits.evaluation, "train")
    )
    assert len(held_out[1]) == 1000
    for parts in zip(train, held_out, both, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts[:2]), parts[2])
    assert np.bincount(held_out[1]).min() > 80  # of each class, so TFDS has shuffled them


def test_load_streams_what_is_over_the_limit(data_dir):
    # 50 images of 4 x 6 x 3 bytes and labels of 8 bytes: 3.8 KiB.
    kwargs = {"data_dir": data_dir, "global_batch_size": 4}
    resident = load("ctl_tiny_color", resident_limit_mib=0.004, **kwargs)
    streamed = load("ctl_tiny_color", resident_limit_mib=0.003, **kwargs)
    assert isinstance(resident, InMemory) and "resident" in resident.description
    assert isinstance(streamed, Streaming) and "streamed" in streamed.description
    assert "\n" not in streamed.description and resident.info == streamed.info


def test_blocks_of_data_in_memory(data_dir):
    options = {"data_dir": data_dir, "global_batch_size": 4, "shuffle_block": 2}
    with pytest.raises(UsageError, match="^shuffle_block=2 has no effect on data in memory"):
        load("ctl_tiny_color", **options)
    load("ctl_tiny_color", training=False, **options)  # of a run whose training data are streamed


def test_no_autotuning_that_whoever_frees_an_iterator_waits_for():
    """See `ctl.data.dataset.distribution_options`. A user's own choice stands."""
    features = np.zeros([8, 2], np.float32)
    mine = tf.data.Dataset.from_tensor_slices(features).batch(2)
    options = tf.data.Options()
    options.autotune.enabled = True
    for dataset, enabled in [
        (InMemory(features, global_batch_size=2), False),
        (GlobalBatches(mine), False),
        (GlobalBatches(mine.with_options(options)), True),
    ]:
        assert dataset.batches(1).options().autotune.enabled is enabled


def test_the_order_is_the_one_of_earlier_releases():
    """A run that was saved resumes with its next batch. If the order must change, let
    `ctl.data.dataset.fingerprint` tell the versions apart, else it resumes with other batches in
    silence."""
    in_memory = InMemory(np.arange(10), global_batch_size=4, seed=3)
    batches = [batch.tolist() for batch in in_memory.batches().take(6).as_numpy_iterator()]
    assert batches[:3] == [[8, 3, 2, 4], [5, 7, 9, 1], [0, 6, 7, 1]]
    assert batches[3:] == [[8, 5, 0, 9], [2, 3, 6, 4], [5, 7, 6, 1]]
    streaming = load(global_batch_size=8, resident_limit_mib=0, seed=3)
    assert isinstance(streaming, Streaming)
    labels = [b[1].tolist() for _, b in streaming.batches().take(2).as_numpy_iterator()]
    assert labels == [[2, 5, 7, 0, 1, 1, 2, 3], [6, 0, 6, 1, 1, 9, 4, 5]]
