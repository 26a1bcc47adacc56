"""How tensors are packed, and that the sums are right under every strategy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from ctl.reduce import all_reduce, densify, make_packs


def tensors(*specs) -> list[tf.TensorSpec]:
    """``(elements, dtype)``; elements None for a shape that is not known."""
    return [tf.TensorSpec([elements], dtype) for elements, dtype in specs]


@pytest.mark.parametrize(
    ("specs", "bytes_per_pack", "packs"),
    [
        ([], 0, []),
        ([(10, "float32")], 0, [[0]]),
        # One pack whatever the sizes, the last gradient first, as the backward pass has them.
        ([(10, "float32"), (10**6, "float32"), (1, "float32")], 0, [[2, 1, 0]]),
        # A dtype has packs of its own, in the order in which its first tensor comes.
        (
            [(1, "float16"), (1, "float32"), (1, "float16"), (1, "float32")],
            0,
            [[3, 1], [2, 0]],
        ),
        # 40 bytes each: two fit into 80 and into 119, three into 120.
        ([(10, "float32")] * 5, 80, [[4, 3], [2, 1], [0]]),
        ([(10, "float32")] * 5, 119, [[4, 3], [2, 1], [0]]),
        ([(10, "float32")] * 5, 120, [[4, 3, 2], [1, 0]]),
        # float16 counts half.
        ([(10, "float16")] * 5, 80, [[4, 3, 2, 1], [0]]),
        # Larger than a pack: alone, and those around it are not lost.
        (
            [(1, "float32"), (100, "float32"), (1, "float32"), (1, "float32")],
            80,
            [[3, 2], [1], [0]],
        ),
        ([(100, "float32")], 80, [[0]]),
        # The size of one dtype does not fill the pack of another.
        (
            [(15, "float32"), (30, "float16"), (5, "float32"), (10, "float16")],
            80,
            [[3, 1], [2, 0]],
        ),
        # Unknown shapes count as nothing.
        ([(None, "float32"), (20, "float32"), (None, "float32")], 80, [[2, 1, 0]]),
        ([(0, "float32"), (20, "float32"), (0, "float32")], 80, [[2, 1, 0]]),
    ],
)
def test_packs(specs, bytes_per_pack, packs):
    assert make_packs(tensors(*specs), bytes_per_pack) == packs


def test_packs_of_many_sizes_hold_each_tensor_once_and_within_the_limit():
    random = np.random.default_rng(0)
    for limit in (1, 64, 400, 4000):
        specs = [
            (int(random.integers(0, 300)), str(random.choice(["float32", "float16", "bfloat16"])))
            for _ in range(60)
        ]
        all_of_them = tensors(*specs)
        packs = make_packs(all_of_them, limit)
        assert sorted(i for pack in packs for i in pack) == list(range(60))
        for pack in packs:
            members = [all_of_them[i] for i in pack]
            assert pack == sorted(pack, reverse=True)
            assert len({m.dtype for m in members}) == 1
            size = sum(m.shape.num_elements() * m.dtype.size for m in members)
            assert size <= limit or sum(m.shape.num_elements() > 0 for m in members) == 1


@pytest.mark.parametrize("bytes_per_pack", [0, 16])
@pytest.mark.parametrize("name", ["one", "two", "four", "ring"])
def test_sums_over_replicas(mirrored, ring2, name, bytes_per_pack):
    """Mixed dtypes, scalars, empty and unknown shapes; whole numbers, so that sums are exact."""
    strategy = ring2 if name == "ring" else mirrored({"one": 1, "two": 2, "four": 4}[name])
    replicas = strategy.num_replicas_in_sync
    values = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(4, dtype=np.float16),
        np.float32(5),
        np.zeros([0, 3], np.float32),
        np.arange(3, dtype=np.float32),
        np.arange(7, dtype=np.float16),
    ]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def run(unknown):
        def replica():
            context = tf.distribute.get_replica_context()
            factor = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
            mine = [tf.cast(factor, v.dtype) * v for v in [*values, unknown]]
            return all_reduce(mine, bytes_per_pack=bytes_per_pack)

        return strategy.run(replica)

    unknown = np.arange(5, dtype=np.float32)
    factor = sum(range(1, replicas + 1))
    for got, value in zip(run(unknown), [*values, unknown], strict=True):
        for copy in strategy.experimental_local_results(got):
            assert copy.dtype == value.dtype
            np.testing.assert_array_equal(copy, factor * value)

    graph = run.get_concrete_function().graph.as_graph_def()
    bodies = [graph.node, *(f.node_def for f in graph.library.function)]
    scopes = {
        node.name.split("ctl_all_reduce/")[1].split("/")[0]
        for body in bodies
        for node in body
        if "ctl_all_reduce/" in node.name and node.op.startswith(("Collective", "AddN"))
    }
    specs = [tf.TensorSpec(v.shape, v.dtype) for v in values] + [tf.TensorSpec([None])]
    packs = make_packs(specs, bytes_per_pack)
    assert len(packs) == (4 if bytes_per_pack else 2)
    if name != "one":  # where nothing is reduced there is nothing to name
        assert scopes == {f"pack{i}" for i in range(len(packs))}


def test_rows_that_occur_twice_are_summed():
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]), tf.constant([2, 0, 2]), [4, 2]
    )
    want = [[10, 20], [0, 0], [101, 202], [0, 0]]
    np.testing.assert_array_equal(densify(slices), want)
    dense = tf.constant([1.0])
    assert densify(dense) is dense


@pytest.mark.parametrize("shared", [(0, 1), (1, 2), (0, 2), (0, 1, 2), ()])
def test_three_terms_are_added_in_the_order_of_the_replicas(mirrored, shared):
    """Whatever else reads the terms of some replicas, here a variable: 1e8 - 1e8 + 0.1 is 0.1, in
    another order it is 0."""
    strategy, terms = mirrored(3), [1e8, -1e8, 0.125]
    variables = []
    for number, term in enumerate(terms):
        with tf.device(f"/cpu:{number}"):
            variables.append(tf.Variable([term]))

    def on_replica():
        number = int(tf.get_static_value(replica_id()))
        value = variables[number].read_value()
        return all_reduce([value if number in shared else -tf.abs(value) * -tf.sign(value)])[0]

    def replica_id():
        return tf.distribute.get_replica_context().replica_id_in_sync_group

    run = tf.function(lambda: strategy.experimental_local_results(strategy.run(on_replica)))
    assert {float(total[0]) for _ in range(20) for total in run()} == {0.125}
