"""``strategy.extended``: what a strategy is composed of, and what libraries call."""

import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import AggregationError, ContextError, NotMirroredError, VariableError
from tests.support.strategies import central, mirrored, on_every_strategy, on_two_replicas

MEAN = distrib.VariableAggregation.MEAN
TASK = "/job:localhost/replica:0/task:0/device:CPU:"


@on_every_strategy
def test_devices(make_strategy):
    extended = make_strategy().extended
    count = make_strategy().num_replicas_in_sync
    assert extended.worker_devices == tuple(f"{TASK}{i}" for i in range(count))
    expected = count if isinstance(make_strategy(), distrib.MirroredStrategy) else 1
    assert extended.parameter_devices == tuple(f"{TASK}{i}" for i in range(expected))
    assert extended.experimental_require_static_shapes is False


def test_the_default_strategy_names_no_device():
    extended = distrib.get_strategy().extended
    assert extended.worker_devices == extended.parameter_devices == ()
    assert extended.mesh is None


@on_every_strategy
def test_variables_know_their_strategy_and_device(make_strategy):
    strategy, other = make_strategy(), make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(v)
    assert not other.extended.variable_created_in_scope(v)
    assert strategy.extended.variable_created_in_scope(v.values[-1])
    with pytest.raises(VariableError, match="3.0 is neither a distrib.Variable nor a copy of one"):
        strategy.extended.variable_created_in_scope(3.0)
    assert strategy.extended.device_of(v) == v.device == f"{TASK}0"


@on_two_replicas
def test_update_gives_all_copies_one_function(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0, aggregation=MEAN)
    update = strategy.extended.update
    update(v, lambda w, x, scale: w.assign_add(x * scale), args=(2.0,), kwargs={"scale": 10})
    assert [float(x) for x in v.values] == [21.0] * len(v.values)
    assert update(v, lambda w: "result") == "result"
    assert update(v, lambda w: "result", group=False) == ("result",)


@on_two_replicas
def test_update_in_a_merge_function(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0, aggregation=MEAN)

    def merge(current, x):
        total = current.extended.reduce_to("SUM", x, v)
        current.extended.update(v, lambda w, t: w.assign_sub(t), args=(total,))

    def step():
        context = distrib.get_replica_context()
        context.merge_call(merge, args=(context.replica_id_in_sync_group + jnp.float32(1),))

    strategy.run(step)
    assert float(v.numpy()) == -2.0
    strategy.extended.assert_mirrored(v)


def test_update_of_a_foreign_variable_names_both_strategies():
    ours, theirs = mirrored(2), central(2)
    with theirs.scope():
        v = distrib.Variable(1.0, name="v")
    message = "'v' belongs to <distrib.CentralStorageStrategy .*not to <distrib.MirroredStrategy"
    with pytest.raises(ContextError, match=message):
        ours.extended.update(v, lambda w: w.assign(2.0))
    assert float(v.numpy()) == 1.0


@on_two_replicas
def test_reduce_and_gather_by_leaf(make_strategy):
    strategy = make_strategy()
    tree = {"x": distrib.PerReplica([jnp.ones(2), 2 * jnp.ones(2)]), "y": [3.0]}
    extended = strategy.extended
    mean = extended.reduce_tree(distrib.ReduceOp.MEAN, tree, None)
    np.testing.assert_array_equal(mean["x"], [1.5, 1.5])
    assert mean["y"] == [3.0]
    assert extended.gather_tree({"x": tree["x"]}, 0)["x"].tolist() == [1, 1, 2, 2]
    assert extended.reduce_to("sum", tree["x"], "CPU:0").tolist() == [3, 3]
    with pytest.raises(AggregationError):
        extended.reduce_to("SUM", tree, "CPU:0")


def test_reduce_to_in_a_step_says_what_to_call():
    strategy = mirrored(2)
    with pytest.raises(ContextError, match=r"reduce_to .*use get_replica_context\(\).merge_call"):
        strategy.run(lambda: strategy.extended.reduce_to("SUM", jnp.ones(1), None))


def test_check_scope():
    ours, theirs = mirrored(2), mirrored(2)
    ours.extended.check_scope()
    with ours.scope():
        ours.extended.check_scope()
        with pytest.raises(ContextError, match="Mixing different distrib.Strategy objects"):
            theirs.extended.check_scope()


def test_which_mesh_variables_live_on():
    strategy = mirrored(2)
    assert strategy.extended.lives_on(strategy.extended.mesh)
    assert not strategy.extended.lives_on(mirrored(4).extended.mesh)
    assert not central(2).extended.lives_on(central(2).extended.mesh)


@on_two_replicas
def test_colocation(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0)
    with strategy.extended.colocate_vars_with(v):
        w = distrib.Variable(2.0)
    assert w.distribute_strategy is strategy
    assert [x.devices() for x in w.values] == [x.devices() for x in v.values]
    outside = distrib.Variable(1.0, name="outside")
    with pytest.raises(
        VariableError, match="`colocate_vars_with` must only be passed a .*'outside"
    ):
        with strategy.extended.colocate_vars_with(outside):
            pass


def test_assert_mirrored_names_what_differs():
    strategy = mirrored(2)
    with strategy.scope():
        same, own = distrib.Variable(1.0), distrib.Variable(1.0, name="own")
    strategy.run(lambda: own.assign(distrib.get_replica_context().replica_id_in_sync_group * 1.0))
    strategy.extended.assert_mirrored({"same": same})
    with pytest.raises(NotMirroredError, match="own"):
        strategy.extended.assert_mirrored({"same": same, "own": own})


@on_two_replicas
def test_compiled_text_takes_what_run_takes(make_strategy):
    strategy = make_strategy()

    def step(x, *, scale):
        return distrib.get_replica_context().all_reduce("SUM", x * scale)

    text = strategy.extended.compiled_text(step, (jnp.ones(5),), {"scale": 2.0})
    assert "all-reduce" in text and "f32[5]" in text
