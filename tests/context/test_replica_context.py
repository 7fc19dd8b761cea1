"""The interface of a replica, in a compiled step and in a thread."""

import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.context import ReplicaContext
from distrib.errors import ContextError
from tests.support.strategies import on_every_strategy, on_two_replicas


def context():
    return distrib.get_replica_context()


def local(strategy, value):
    return [np.asarray(part).tolist() for part in strategy.experimental_local_results(value)]


@on_every_strategy
def test_who_a_replica_is(make_strategy, engine):
    strategy = make_strategy()
    count = strategy.num_replicas_in_sync
    seen = []

    def step():
        me = context()
        seen.append((me.strategy is strategy, me.num_replicas_in_sync, len(me.devices)))
        assert jnp.shape(me.replica_id_in_sync_group) == ()
        assert jnp.result_type(me.replica_id_in_sync_group) == jnp.int32
        assert isinstance(me, ReplicaContext)
        return jnp.asarray(me.replica_id_in_sync_group)

    assert local(strategy, strategy.run(step)) == list(range(count))
    assert set(seen) == {(True, count, 1)}


@on_two_replicas
@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", 3.0), ("MEAN", 1.5), (distrib.ReduceOp.SUM, 3.0), (distrib.ReduceOp.MEAN, 1.5)],
)
def test_the_op_by_name_or_member(make_strategy, engine, op, expected):
    strategy = make_strategy()

    def step():
        return context().all_reduce(op, {"a": context().replica_id_in_sync_group + jnp.ones(2)})

    assert local(strategy, strategy.run(step)["a"]) == [[expected] * 2] * 2


@on_two_replicas
def test_the_mean_of_integers_is_floating(make_strategy, engine):
    strategy = make_strategy()
    result = strategy.run(
        lambda: context().all_reduce("MEAN", context().replica_id_in_sync_group * jnp.int32(1))
    )
    assert local(strategy, result) == [0.5, 0.5]


@on_two_replicas
@pytest.mark.parametrize("op", ["PRODUCT", None, 3])
def test_an_unknown_op(make_strategy, engine, op):
    with pytest.raises(ValueError, match=f"{op!r} is not a valid ReduceOp: pass ReduceOp.SUM"):
        make_strategy().run(lambda: context().all_reduce(op, jnp.ones(2)))


@on_two_replicas
def test_leaves_that_are_no_arrays(make_strategy, engine):
    for call in (
        lambda: context().all_reduce("SUM", 1.0),
        lambda: context().all_gather("text", 0),
    ):
        with pytest.raises(TypeError, match="all_(reduce|gather)"):
            make_strategy().run(call)


@on_two_replicas
@pytest.mark.parametrize("axis", [0, -1])
def test_all_gather_in_the_order_of_the_replicas(make_strategy, engine, axis):
    strategy = make_strategy()

    def step():
        x = jnp.full((1, 2), context().replica_id_in_sync_group)
        return context().all_gather({"x": x}, axis)["x"]

    expected = [[0, 0], [1, 1]] if axis == 0 else [[0, 0, 1, 1]]
    assert local(strategy, strategy.run(step)) == [expected] * 2


@on_every_strategy
@pytest.mark.parametrize(("shape", "axis"), [((0, 2), 0), ((2, 0), -1), ((2, 0), 0)])
def test_all_gather_of_nothing(make_strategy, engine, shape, axis):
    strategy = make_strategy()
    result = strategy.run(lambda: context().all_gather(jnp.ones(shape), axis))
    expected = np.concatenate([np.ones(shape)] * strategy.num_replicas_in_sync, axis)
    for part in strategy.experimental_local_results(result):
        assert part.shape == expected.shape


@on_two_replicas
@pytest.mark.parametrize(("shape", "axis"), [((), 0), ((2,), 1), ((2,), -2)])
def test_all_gather_along_an_axis_that_is_not_there(make_strategy, engine, shape, axis):
    with pytest.raises(ValueError, match=f"axis {axis} got an array of shape"):
        make_strategy().run(lambda: context().all_gather(jnp.ones(shape), axis))


@on_two_replicas
def test_a_merge_function_is_called_once_with_per_replica_values(make_strategy, engine):
    strategy = make_strategy()
    calls = []

    def merge(current, tree, constant, *, scale):
        calls.append((current is strategy, constant, distrib.in_cross_replica_context()))
        assert isinstance(tree["x"], distrib.PerReplica)
        return current.reduce("SUM", tree["x"], axis=None) * scale, tree, "done"

    def step():
        x = context().replica_id_in_sync_group + jnp.float32(1)
        total, tree, text = context().merge_call(
            merge, args=({"x": x}, "constant"), kwargs={"scale": 10}
        )
        assert text == "done"
        return total, tree["x"]  # of a per-replica value, the component of this replica

    total, mine = strategy.run(step)
    assert local(strategy, total) == [30, 30]
    assert local(strategy, mine) == [1, 2]
    assert len(calls) == 1
    assert calls[0][0] and calls[0][2]


@on_every_strategy
def test_it_is_of_the_code_of_its_replica(make_strategy, engine):
    strategy, kept = make_strategy(), []

    def step():
        replica = context()
        kept.append(replica)
        return replica.merge_call(lambda _: replica.all_reduce("SUM", jnp.float32(1)))

    with pytest.raises(ContextError, match="all_reduce was called inside a merge function"):
        strategy.run(step)
    for use in (
        lambda: kept[0].all_reduce("SUM", jnp.float32(1)),
        lambda: kept[0].all_gather(jnp.ones(1), 0),
        lambda: kept[0].merge_call(lambda _: 1),
    ):
        with pytest.raises(ContextError, match="call distrib.get_replica_context.. where you use"):
            use()
    assert kept[0].num_replicas_in_sync == strategy.num_replicas_in_sync


@on_two_replicas
def test_a_merge_function_without_arguments(make_strategy, engine):
    strategy = make_strategy()

    def merge(current):
        return current.num_replicas_in_sync

    assert strategy.run(lambda: jnp.asarray(context().merge_call(merge))).values[1] == 2


@on_two_replicas
def test_an_error_in_a_merge_function(make_strategy, engine):
    def merge(current):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make_strategy().run(lambda: context().merge_call(merge))
