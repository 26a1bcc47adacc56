"""The update of reduced gradients, without a model: what is refused, rates, loss scale, averages.

That each optimizer and feature equals plain Keras is in test_step.py.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import sgd

from ctl.errors import UsageError
from ctl.phases.apply import LossScale, Updater
from ctl.phases.norms import global_norm
from ctl.phases.optimizers import check_optimizer
from ctl.schedule import make_schedule

pytestmark = pytest.mark.compiled_update


class Mine(keras.optimizers.Optimizer):
    """A user's own: minus the rate times the sign."""

    def update_step(self, gradient, variable, learning_rate):
        variable.assign_sub(tf.cast(learning_rate, variable.dtype) * tf.sign(gradient))


def make(strategy, optimizer, **options) -> Updater:
    with strategy.scope():
        variables = [
            keras.Variable(np.zeros(3, "float32"), name="a"),
            keras.Variable(np.ones(2, "float32"), name="b"),
        ]
        return Updater(optimizer(), variables, **options)


def merge(updater, gradients) -> None:
    tf.distribute.get_replica_context().merge_call(updater, args=(gradients, None))


def update(strategy, updater, *gradients, finite=None) -> None:
    """One update, as the step does it."""

    @tf.function
    def run():
        def replica():
            tensors = [None if g is None else tf.constant(g, tf.float32) for g in gradients]
            judged = None if finite is None else tf.constant(finite)
            tf.distribute.get_replica_context().merge_call(updater, args=(tensors, judged))

        strategy.run(replica)

    run()


def values(updater) -> list[np.ndarray]:
    return [v.numpy() for v in updater.variables]


ONES = ([1.0, 1.0, 1.0], [1.0, 1.0])


def test_an_optimizer_of_ones_own(mirrored):
    strategy = mirrored(2)
    updater = make(strategy, lambda: Mine(0.25))
    update(strategy, updater, [3.0, -5.0, 0.0], [7.0, -1.0])
    np.testing.assert_array_equal(values(updater)[0], [-0.25, 0.25, 0])
    np.testing.assert_array_equal(values(updater)[1], [0.75, 1.25])
    assert int(updater.global_step.numpy()) == 1
    assert int(updater.groups[0].optimizer.iterations.numpy()) == 1


@pytest.mark.parametrize("kind", [keras.optimizers.Adam, keras.optimizers.Nadam])
def test_a_group_without_a_gradient_counts_no_update(kind):
    """As the optimizer of a network that learns at some steps only. The first update of a group is
    the same at every step; averages begin with the first of any group."""
    variables = [keras.Variable(np.zeros(2, "float32"), name=name) for name in "ab"]
    groups = [(kind(0.25), [variable]) for variable in variables]
    updater = Updater(groups, variables, ema_decay=0.5)
    update(tf.distribute.get_strategy(), updater, None, [3.0, -5.0])
    first = variables[1].numpy()
    update(tf.distribute.get_strategy(), updater, [3.0, -5.0], None)
    np.testing.assert_array_equal(variables[0].numpy(), first)
    np.testing.assert_array_equal(updater.ema[0].numpy(), first / 2)
    assert [int(group.optimizer.iterations.numpy()) for group in updater.groups] == [1, 1]
    assert int(updater.global_step.numpy()) == 2


def test_a_subclass_of_a_proven_one_may_change_its_update_step(mirrored):
    class Twice(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, 2 * learning_rate)

    updater = make(mirrored(1), lambda: Twice(0.5))
    update(mirrored(1), updater, *ONES)
    np.testing.assert_array_equal(values(updater)[1], [0.0, 0.0])


@pytest.mark.parametrize(
    "method",
    ["apply", "_backend_apply_gradients", "_backend_update_step", "_apply_weight_decay"]
    + ["apply_gradients", "_clip_gradients", "scale_loss", "finalize_variable_values"],
    ids=str,
)
def test_an_update_outside_of_update_step_is_refused(method):
    """Also one of an optimizer that ctl knows, and one of a single object."""
    for base in (keras.optimizers.SGD, keras.optimizers.Nadam, keras.optimizers.Muon):
        kind = type("Elsewhere", (base,), {method: lambda self, *args: None})
        with pytest.raises(UsageError, match=rf"Elsewhere overrides {method}\(\)") as error:
            check_optimizer(kind())
        assert "\n" not in str(error.value)
    optimizer = keras.optimizers.SGD()
    setattr(optimizer, method, getattr(optimizer, method))
    with pytest.raises(UsageError, match=rf"SGD overrides {method}\(\)"):
        check_optimizer(optimizer)


def test_what_keras_3_would_not_call_is_refused():
    class OfKeras2(keras.optimizers.Optimizer):
        def update_step(self, gradient, variable):
            pass

    for kind in (OfKeras2, type("Empty", (keras.optimizers.Optimizer,), {})):
        with pytest.raises(
            UsageError, match=r"must have update_step\(gradient, variable, learning"
        ):
            check_optimizer(kind(0.1))


def test_python_state_of_an_update_is_refused(mirrored):
    """A graph would hold it, with another value on each replica."""

    class Counting(keras.optimizers.SGD):
        def __init__(self, rate):
            super().__init__(rate)
            self.calls = 0

        def update_step(self, gradient, variable, learning_rate):
            self.calls += 1
            super().update_step(gradient, variable, learning_rate / self.calls)

    class Late(keras.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            slot = self.add_variable_from_reference(variable, "late")
            slot.assign(gradient)
            variable.assign_sub(learning_rate * slot)

    for kind, what in ((Counting, "calls"), (Late, "number of variables")):
        updater = make(mirrored(2), functools.partial(kind, 0.5))
        with pytest.raises(UsageError, match=rf"{kind.__name__} changes its {what} in update_step"):
            update(mirrored(2), updater, *ONES)


def test_an_update_that_reads_the_rate_of_its_optimizer_sees_the_schedule(mirrored):
    class Reads(keras.optimizers.Optimizer):
        def update_step(self, gradient, variable, learning_rate):
            variable.assign_sub(self.learning_rate * gradient)

    def halving(step):
        return 0.5 ** tf.cast(step + 1, tf.float32)

    updater = make(mirrored(2), lambda: Reads(9.0), schedule=halving)
    update(mirrored(2), updater, *ONES)
    update(mirrored(2), updater, *ONES)
    np.testing.assert_array_equal(values(updater)[1], [0.25, 0.25])


class Slow(keras.optimizers.Optimizer):
    """A user's own: its slots begin as the weights."""

    def build(self, variables):
        super().build(variables)
        self.slow = self.add_optimizer_variables(variables, "slow")
        for slot, variable in zip(self.slow, variables, strict=True):
            slot.assign(variable)

    def update_step(self, gradient, variable, learning_rate):
        slot = self.slow[self._get_variable_index(variable)]
        self.assign(variable, slot - learning_rate * gradient)


def test_copies_of_the_weights_begin_as_what_was_loaded(mirrored):
    """Slots and averages, until the first update."""
    updater = make(mirrored(2), lambda: Slow(0.5), ema_decay=0.5)

    def load(value):
        for variable in updater.variables:
            variable.assign(np.full(variable.shape, value))

    load(3.0)
    with updater.averaged():
        np.testing.assert_array_equal(values(updater)[0], [3.0] * 3)
    assert updater.state()["ema"][0].numpy().tolist() == [3.0] * 3
    load(5.0)
    updater.renew_copies()
    update(mirrored(2), updater, *ONES)
    np.testing.assert_array_equal(values(updater)[0], [4.5] * 3)
    load(7.0)
    updater.renew_copies()
    np.testing.assert_array_equal(updater.ema[0].numpy(), [4.5] * 3)
    np.testing.assert_array_equal(updater.groups[0].optimizer.slow[0].numpy(), [5.0] * 3)


def test_a_variable_overwritten_by_its_gradient_is_refused(mirrored):
    with mirrored(1).scope():
        variable = keras.Variable(np.zeros(2, "float32"))
        variable.overwrite_with_gradient = True
        with pytest.raises(UsageError, match="has overwrite_with_gradient=True"):
            Updater(keras.optimizers.SGD(), [variable])


def test_the_norm_of_gradients_of_several_types():
    """As float16, the square of 300 is Inf, and that of 1e-4 is 0."""
    large = [tf.constant([300.0], tf.float16), None, tf.constant([400.0], tf.float64)]
    assert float(global_norm(large)) == 500.0
    small = [tf.constant([1e-4] * 4, tf.float16), tf.constant([0.0], tf.bfloat16)]
    assert float(global_norm(small)) == pytest.approx(2e-4, rel=1e-3)
    huge = [tf.constant([3e25, 0.0]), tf.zeros([0]), tf.constant([4e25])]  # so is this, as float32
    assert float(global_norm(huge)) == pytest.approx(5e25)
    assert float(global_norm([tf.zeros([2])])) == 0.0
    for wrong in (np.nan, np.inf):
        assert not np.isfinite(float(global_norm([tf.constant([1.0, wrong])])))
    random = [tf.constant(np.random.default_rng(0).normal(size=50), tf.float32) for _ in range(3)]
    assert float(global_norm(random)) == float(tf.linalg.global_norm(random))


def test_none_leaves_a_variable_as_it_is(mirrored):
    """Weight decay too; its average goes on."""
    updater = make(mirrored(1), sgd(0.5, weight_decay=0.5), ema_decay=0.5)
    update(mirrored(1), updater, ONES[0], None)
    np.testing.assert_array_equal(values(updater)[0], [-0.5] * 3)
    np.testing.assert_array_equal(values(updater)[1], [1.0, 1.0])
    np.testing.assert_array_equal(updater.ema[1].numpy(), [1.0, 1.0])


def keras_schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [1.0, 2.0, 4.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "schedule", "rates"),
    [
        (sgd(0.5), None, [0.5, 0.5, 0.5, 0.5]),
        (lambda: keras.optimizers.SGD(keras_schedule()), None, [1.0, 1.0, 2.0, 4.0]),
        (sgd(0.5), keras_schedule(), [1.0, 1.0, 2.0, 4.0]),
        (sgd(0.5), lambda step: 1.0 + tf.cast(step, tf.float32), [1.0, 2.0, 3.0, 4.0]),
        (sgd(0.5), make_schedule("cosine", learning_rate=1.0, total_steps=4), None),
    ],
    ids=["float", "keras, in the optimizer", "keras", "function", "ctl"],
)
def test_the_rate_is_the_one_that_is_said(mirrored, optimizer, schedule, rates):
    strategy = mirrored(2)
    updater = make(strategy, optimizer, schedule=schedule)
    if rates is None:
        rates = [float(schedule(step)) for step in range(4)]
        assert len(set(rates)) > 1
    for rate in rates:
        before = values(updater)[0]
        assert float(updater.learning_rates()[0]) == rate
        assert updater.learning_rates()[0].dtype == tf.float32
        update(strategy, updater, *ONES)
        np.testing.assert_array_equal(values(updater)[0], before - np.float32(rate))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"loss_scale": True}, keras.optimizers.AdamW),
        ({"skip_nonfinite": True}, keras.optimizers.Nadam),  # with a product of all steps
    ],
    ids=str,
)
def test_gradients_that_are_not_finite_leave_everything_but_the_counters(mirrored, options, kind):
    strategy = mirrored(2)
    updater = make(strategy, lambda: kind(0.1), ema_decay=0.5, **options)
    update(strategy, updater, *ONES, finite=True)
    state = {k: [v.numpy() for v in group] for k, group in updater.state().items()}
    before = values(updater)
    update(strategy, updater, [np.nan] * 3, ONES[1], finite=False)
    np.testing.assert_equal(values(updater), before)
    after = {k: [v.numpy() for v in group] for k, group in updater.state().items()}
    for key in ("optimizer", "ema"):
        np.testing.assert_equal(after[key], state[key])
    assert [int(c) for c in after["counters"]] == [2, 1]  # the position in the data goes on
    update(strategy, updater, *ONES, finite=True)
    assert int(updater.skipped.numpy()) == 1
    assert int(updater.groups[0].optimizer.iterations.numpy()) == 2
    assert all((a != b).all() for a, b in zip(values(updater), before, strict=True))


def test_a_loss_scale_grows_halves_and_stays_above_one():
    scale = LossScale(initial=8.0, growth_steps=3)

    def after(*calls):
        for call in calls:
            call()
        return float(scale.scale.numpy()), int(scale.finite_steps.numpy())

    good, bad = scale.good, scale.bad
    assert after(good, good) == (8.0, 2)
    assert after(good) == (16.0, 0)
    assert after(good, good) == (16.0, 2)
    assert after(bad) == (8.0, 0)  # and the count begins anew
    assert after(good, good) == (8.0, 2)
    assert after(good) == (16.0, 0)
    assert after(*[bad] * 4) == (1.0, 0)
    assert after(bad, bad) == (1.0, 0)
    assert after(good, good, good) == (2.0, 0)
    scale.scale.assign(2.0**126)
    assert after(*[good] * 9) == (2.0**127, 0)  # infinity would never come back
    assert after(bad) == (2.0**126, 0)


def test_averages(mirrored):
    """The weights after the first update, then decay * average + (1 - decay) * weights."""
    strategy = mirrored(2)
    updater = make(strategy, sgd(0.5), ema_decay=0.75)
    update(strategy, updater, *ONES)
    np.testing.assert_array_equal(updater.ema[1].numpy(), [0.5, 0.5])
    update(strategy, updater, *ONES)
    np.testing.assert_array_equal(updater.ema[1].numpy(), [0.375, 0.375])
    with updater.averaged():
        np.testing.assert_array_equal(values(updater)[1], [0.375, 0.375])
    np.testing.assert_array_equal(values(updater)[1], [0.0, 0.0])
    with pytest.raises(ZeroDivisionError), updater.averaged():
        raise ZeroDivisionError
    np.testing.assert_array_equal(values(updater)[1], [0.0, 0.0])


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Lamb", "Nadam", "ScheduleFreeAdamW"])
def test_a_decay_that_rounds_to_1_is_refused(mirrored, kind):
    """Keras's Adam leaves such weights as they are, for ever and in silence."""
    optimizer = getattr(keras.optimizers, kind)
    words = f"{kind} has beta_2=0.999, which is 1 in bfloat16, so it would not move weights: keep"
    with mirrored(1).scope():
        weights = keras.Variable(np.ones(3), dtype="bfloat16", name="weights")
        with pytest.raises(UsageError, match=words):
            Updater(optimizer(), [weights])
        updater = Updater(optimizer(0.1, beta_2=0.99), [weights])
    gradient = tf.constant([1.0, 0.5, 0.0], tf.bfloat16)
    tf.function(lambda: mirrored(1).run(lambda: merge(updater, [gradient])))()
    moved = weights.numpy().astype("float32") - 1.0
    assert (moved[:2] < -0.05).all()


@pytest.mark.parametrize(
    "kind, factor",
    [("Adam", 1), ("AdamW", 1), ("RMSprop", 1), ("Adadelta", 1), ("ScheduleFreeAdamW", 1)]
    + [("Adamax", 10)],  # divides by (1 - beta_1) * epsilon
)
def test_an_epsilon_that_rounds_to_0_is_refused(mirrored, kind, factor):
    """Keras's Adam makes NaN of a weight whose gradient is 0."""
    optimizer = getattr(keras.optimizers, kind)
    words = f"{kind} has epsilon=1e-0., which is too small for float16: weights would become NaN"
    with mirrored(1).scope():
        weights = keras.Variable(np.ones(3), dtype="float16", name="weights")
        with pytest.raises(UsageError, match=f"{words}.* use epsilon={1e-7 * factor:.0e}"):
            Updater(optimizer(epsilon=1e-8 * factor), [weights])
        updater = Updater(optimizer(0.1, epsilon=1e-7 * factor), [weights])
    gradient = tf.constant([1.0, 0.5, 0.0], tf.float16)
    tf.function(lambda: mirrored(1).run(lambda: merge(updater, [gradient])))()
    assert np.isfinite(weights.numpy()).all()


@pytest.mark.parametrize("kind, dtype", [("Muon", "bfloat16"), ("Adafactor", "float16")])
def test_weights_of_a_type_that_keras_cannot_update_are_refused(mirrored, kind, dtype):
    """Adafactor makes NaN of float16 weights whose gradients are small."""
    with mirrored(1).scope():
        weights = keras.Variable(np.ones([2, 2]), dtype=dtype, name="weights")
        with pytest.raises(UsageError, match=f"{kind} cannot train weights in {dtype}: keep"):
            Updater(getattr(keras.optimizers, kind)(), [weights])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_averages_of_other_types_than_float32(mirrored, dtype):
    """Kept in float32 at least: in bfloat16, 0.999 is 1."""
    with mirrored(2).scope():
        variable = keras.Variable(np.ones(2), name="b", dtype=dtype)
        updater = Updater(keras.optimizers.SGD(0.0), [variable], ema_decay=0.999)
    gradient = tf.zeros(2, dtype)
    run = tf.function(lambda: mirrored(2).run(lambda: merge(updater, [gradient])))
    run()
    variable.value.assign(tf.constant([2.0, 3.0], dtype))
    run()
    (average,) = updater.ema
    assert average.dtype == ("float64" if dtype == "float64" else "float32")
    np.testing.assert_allclose(average.numpy(), [1.001, 1.002], rtol=1e-6)
    with updater.averaged():
        expected = tf.cast(average.read_value(), dtype).numpy()
        np.testing.assert_array_equal(variable.value.numpy(), expected)
    np.testing.assert_array_equal(tf.cast(variable.value, tf.float32).numpy(), [2.0, 3.0])


def test_weights_are_put_back_when_swapping_fails_half_way(mirrored, monkeypatch):
    updater = make(mirrored(1), sgd(0.5), ema_decay=0.5)
    update(mirrored(1), updater, *ONES)
    update(mirrored(1), updater, *ONES)
    trained = values(updater)

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(updater.ema[1], "read_value", interrupted)
    with pytest.raises(KeyboardInterrupt), updater.averaged():
        pass
    np.testing.assert_equal(values(updater), trained)


def test_without_averages_the_weights_are_the_weights(mirrored):
    updater = make(mirrored(1), sgd(0.5))
    assert updater.ema == [] and "ema" not in updater.state()
    with updater.averaged():
        np.testing.assert_array_equal(values(updater)[1], [1.0, 1.0])
