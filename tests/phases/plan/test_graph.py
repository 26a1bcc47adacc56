"""Graphs whose shape is known: what comes before what, through functions, branches and loops."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from ctl.phases.plan.graph import Graph, Node, Tensor, constant, flops


def graph_of(function, *specs) -> Graph:
    concrete = tf.function(function, autograph=True).get_concrete_function(*specs)
    return Graph(concrete.graph.as_graph_def(add_shapes=True))


def named(graph: Graph, name: str) -> Node:
    (node,) = [n for n in graph.nodes if n.name.split("/")[-1] == name]
    return node


def before(graph: Graph, name: str) -> set[str]:
    return {n.name.split("/")[-1] for n in graph.ancestors([named(graph, name)])}


X = tf.TensorSpec([4, 3])


def test_outputs_of_a_function_are_told_apart():
    @tf.function
    def inner(x):
        return tf.identity(tf.sin(x, name="one")), tf.identity(tf.cos(x, name="two"))

    def outer(x):
        first, second = inner(tf.exp(x, name="first_of_all"))
        return tf.tanh(first, name="use_one"), tf.tan(second, name="use_two")

    graph = graph_of(outer, X)
    assert {"one", "first_of_all"} <= before(graph, "use_one")
    assert "two" not in before(graph, "use_one")
    assert {"two", "first_of_all"} <= before(graph, "use_two")
    takers = graph.consumers(Tensor(named(graph, "first_of_all"), 0))
    assert {("one", 0), ("two", 0)} <= {(n.name.split("/")[-1], index) for n, index in takers}
    assert not named(graph, "one").in_loop


def test_outputs_of_what_xla_compiles_come_together():
    inner = tf.function(lambda x: (tf.sin(x, name="one"), tf.cos(x, name="two")), jit_compile=True)

    def outer(x):
        first, _ = inner(x)
        return tf.tanh(first, name="use_one")

    assert {"one", "two"} <= before(graph_of(outer, X), "use_one")


def test_a_branch_waits_for_its_condition_and_may_be_either():
    def either(x):
        positive = tf.greater(tf.reduce_sum(x, name="total"), 0.0)
        y = tf.cond(positive, lambda: tf.sin(x, name="yes"), lambda: tf.cos(x, name="no"))
        return tf.exp(y, name="after")

    assert {"yes", "no", "total"} <= before(graph_of(either, X), "after")


def test_a_loop_is_seen_once_and_ends_before_what_follows():
    def loop(x):
        y = tf.sin(x, name="begin")
        for _ in tf.range(3):
            y = tf.cos(y, name="again")
        return tf.exp(y, name="after")

    graph = graph_of(loop, X)
    assert named(graph, "again").in_loop and not named(graph, "begin").in_loop
    assert "begin" in before(graph, "again") and "after" not in before(graph, "again")
    assert {"begin", "again"} <= before(graph, "after")


def test_what_an_argument_becomes():
    compiled = tf.function(
        lambda x, y: (tf.sin(y, name="s"), tf.cos(x, name="c")), jit_compile=True
    )

    def outer(x):
        first, second = compiled(tf.exp(x), x)
        for _ in tf.range(2):
            first, second = tf.identity(second, name="swap"), first
        return tf.cond(tf.reduce_sum(x) > 0, lambda: first, lambda: second)

    graph = graph_of(outer, X)

    def user(name: str) -> tuple[Node, int]:
        """Who takes what a body returns, behind the Identity that each body ends in."""
        ((end, _),) = graph.consumers(Tensor(named(graph, name), 0))
        ((node, index),) = graph.consumers(Tensor(end, 0))
        return node, index

    call, index = user("s")
    assert graph.becomes(call, index) == [Tensor(call, 0)]
    call, index = user("c")
    assert graph.becomes(call, index) == [Tensor(call, 1)]
    assert graph.becomes(call, 0) == []  # goes on inside
    loop, index = user("swap")
    assert loop.op == "StatelessWhile" and len(graph.becomes(loop, index)) == 1
    assert graph.becomes(loop, 0) == []
    merge = next(n for n in graph.nodes if n.op == "Merge")
    assert graph.becomes(merge, 0) == [Tensor(merge, 0)]
    assert graph.becomes(named(graph, "s"), 0) is None


def test_control_dependencies_of_calls_count():
    variable = tf.Variable(0.0)

    @tf.function
    def write(x):
        variable.assign(tf.reduce_sum(x, name="total"))

    def outer(x):
        write(x)
        return tf.exp(variable.read_value(), name="after")

    assert "total" in before(graph_of(outer, X), "after")


def test_the_backward_pass():
    weight = tf.Variable(np.ones([3, 2], np.float32))

    @tf.function
    def forward(x):
        return tf.matmul(x, weight, name="product")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(forward(x) ** 2)
        return tape.gradient(loss, weight)

    graph = graph_of(step, X)
    products = [n for n in graph.nodes if n.op == "MatMul"]
    assert not named(graph, "product").backward  # the others are in a function of gradients
    assert len(products) > 1 and all(n.backward for n in products if n.name[-7:] != "product")
    assert any(n.backward and "gradient_tape/" in n.name for n in graph.nodes)


def test_flops():
    kernel = tf.Variable(np.ones([3, 3, 2, 8], np.float32))
    weight = tf.Variable(np.ones([5 * 5 * 8, 7], np.float32))

    def step(images):
        with tf.GradientTape() as tape:
            tape.watch(images)
            hidden = tf.nn.conv2d(images, kernel, 1, "SAME")
            out = tf.einsum("bi,io->bo", tf.reshape(hidden, [-1, 5 * 5 * 8]), weight)
            loss = tf.reduce_sum(tf.matmul(out, out, transpose_b=True))
        return tape.gradient(loss, [images, kernel, weight])

    def counted(batch):
        graph = graph_of(step, tf.TensorSpec([batch, 5, 5, 2]))
        found = {}
        for node in graph.nodes:
            found.setdefault(node.op, []).append(flops(node))
        return found

    four = counted(4)
    convolution = 2 * 4 * 5 * 5 * 8 * 3 * 3 * 2
    assert four["Conv2D"] == [convolution]
    assert four["Conv2DBackpropInput"] == four["Conv2DBackpropFilter"] == [convolution]
    assert four["Einsum"] == [2 * 4 * 200 * 7] * 3
    assert sorted(four["MatMul"]) == [2 * 4 * 4 * 7] * 3
    # Of a batch of unknown size only proportions are known.
    assert counted(None)["Conv2D"] == [convolution // 4]
    assert four["Sum"] == [0] and four["Reshape"][0] == 0


def test_flops_of_an_einsum_of_any_rank_are_not_counted():
    graph = graph_of(lambda x: tf.einsum("...i,io->...o", x, tf.ones([3, 2])), X)
    assert [flops(node) for node in graph.nodes if node.op == "Einsum"] == [0]


def test_constants():
    graph = graph_of(lambda: tf.identity(tf.identity(tf.constant(7)), name="seven"))
    assert constant(Tensor(named(graph, "seven"), 0)) == 7
    graph = graph_of(lambda x: tf.exp(x, name="e"), X)
    assert constant(Tensor(named(graph, "e"), 0)) is None
