"""``extended.update``: numbers and contexts as tf.distribute 2.21 gave them."""

import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import ContextError, VariableError
from tests.support.strategies import central, mirrored, on_every_strategy

ON_READ = distrib.VariableSynchronization.ON_READ
SUM = distrib.VariableAggregation.SUM


def made(strategy, value=10.0, **kwargs):
    with strategy.scope():
        return distrib.Variable(value, name="v", **kwargs)


def ids(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda c: jnp.float32(c.replica_id_in_sync_group + 1)
    )


def context():
    return distrib.get_replica_context()


def replica_number():
    return jnp.asarray(context().replica_id_in_sync_group, jnp.float32) + 1


def numbers(tree):
    if isinstance(tree, distrib.DistributedValues):
        return [type(tree).__name__, *map(float, tree.values)]
    return float(tree)


def test_each_copy_is_changed_by_what_belongs_to_it():
    strategy = mirrored(3)
    v, x = made(strategy), ids(strategy)
    update = strategy.extended.update
    result = update(v, lambda w, y: w.assign_sub(y), args=(x,))
    assert numbers(result) == ["Mirrored", 9, 8, 7]
    assert [float(c) for c in v.values] == [9, 8, 7]
    assert [c.devices() for c in result.values] == [c.devices() for c in v.values]
    doubled = update(v, lambda w, y: y[0] * 2.0 + w, kwargs={"y": [x]}, group=False)
    assert [float(c) for c in doubled] == [11, 12, 13]


def test_the_copies_of_other_variables_come_along():
    strategy = mirrored(2)
    v, u = made(strategy), made(strategy, 5.0, synchronization=ON_READ, aggregation=SUM)
    strategy.run(lambda: u.assign(replica_number()))
    strategy.extended.update(v, lambda w, z: (w.assign(z), z.assign_add(1.0)), args=(u,))
    assert [float(c) for c in v.values] == [1, 2]
    assert [float(c) for c in u.values] == [2, 3]


def test_what_a_function_returns():
    strategy = mirrored(2)
    v = made(strategy)
    update = strategy.extended.update
    assert update(v, lambda w: None) is None
    assert update(v, lambda w: 7) == 7
    assert update(v, lambda w: (7, None), group=False) == ((7,), (None,))
    parts, sevens = update(v, lambda w: (w + 1.0, 7), group=False)
    assert ([float(part) for part in parts], sevens) == ([11, 11], (7,))
    array, constant = update(v, lambda w: (w.read_value(), "text"))
    assert (numbers(array), constant) == (["Mirrored", 10, 10], "text")
    assert update(v, lambda w: w) is v
    assert [name[-6:] for name in update(v, lambda w: w.device, group=False)] == [
        ":CPU:0",
        ":CPU:1",
    ]


def test_inside_it_is_cross_replica_context():
    strategy = mirrored(2)
    v, u = made(strategy), made(strategy)
    seen = strategy.extended.update(
        v,
        lambda w: (
            distrib.in_cross_replica_context(),
            distrib.get_replica_context() is None,
            distrib.get_strategy() is strategy,
        ),
    )
    assert seen == (True, True, True)
    # Every call of the outer function changes all copies of the other variable.
    strategy.extended.update(
        v, lambda w: strategy.extended.update(u, lambda z: z.assign_add(1.0)) and None
    )
    assert [float(c) for c in u.values] == [12, 12]
    strategy.extended.update(v, lambda w: v.assign(3.0) and None)
    assert [float(c) for c in v.values] == [3, 3]


@on_every_strategy
def test_a_function_that_fails_changes_nothing(make_strategy):
    strategy = make_strategy()
    v = made(strategy)
    with pytest.raises(ZeroDivisionError):
        strategy.extended.update(v, lambda w: (w.assign(99.0), 1 / 0))
    assert [float(c) for c in v.values] == [10] * len(v.values)
    strategy.extended.assert_mirrored(v)


@on_every_strategy
def test_in_a_replica_the_replicas_meet(make_strategy, engine):
    strategy = make_strategy()
    n = strategy.num_replicas_in_sync
    v = made(strategy)

    def step():
        update = strategy.extended.update
        apart = update(v, lambda w, x: 3.0 * x, args=(replica_number(),), group=False)
        return update(v, lambda w, x: w.assign_add(x), args=(replica_number(),)), apart

    changed, apart = strategy.run(step)
    copies = [11.0 + i for i in range(len(v.values))]
    assert [float(c) for c in v.values] == copies
    seen = [float(x) for x in strategy.experimental_local_results(changed)]
    assert seen == (copies if len(copies) == n else [11.0] * n)
    assert len(apart) == len(v.values)
    for i, part in enumerate(apart):
        assert {float(x) for x in strategy.experimental_local_results(part)} == {3.0 * (i + 1)}


@on_every_strategy
def test_in_a_merge_function(make_strategy, engine):
    strategy = make_strategy()
    n = strategy.num_replicas_in_sync
    v = made(strategy, 1.0)
    own = made(strategy, 0.0, synchronization=ON_READ, aggregation=SUM)

    def merge(current, x):
        total = current.extended.reduce_to("SUM", x, v)
        current.extended.update(v, lambda w, t: w.assign_sub(t * 0.5), args=(total,))
        current.extended.update(own, lambda w: w.assign_add(w + 2.0))
        return total * 2.0

    def step():
        return context().merge_call(merge, args=(replica_number(),)), v.value()

    doubled, after = strategy.run(step)
    total = n * (n + 1) / 2
    for result, expected in ((doubled, 2 * total), (after, 1 - total / 2)):
        found = [float(x) for x in strategy.experimental_local_results(result)]
        assert found == [expected] * n
    strategy.extended.assert_mirrored(v)
    assert [float(c) for c in own.values] == [2.0] * len(own.values)


@pytest.mark.parametrize("make", [lambda: mirrored(2), lambda: central(2)], ids=["mir", "central"])
def test_rows_that_differ_by_copy(make):
    strategy = make()
    v = made(strategy, [0.0, 0.0])
    rows = strategy.experimental_distribute_values_from_function(
        lambda c: distrib.IndexedSlices([5.0], [c.replica_id_in_sync_group], (2,))
    )
    v.scatter_add(rows)
    assert [c.tolist() for c in v.values] == [[5, 0], [0, 5]][: len(v.values)]


def test_what_is_refused():
    ours, theirs = mirrored(2), mirrored(2)
    v = made(ours)
    with pytest.raises(VariableError, match="You can not update `var` 3.0. It must be a distrib.V"):
        ours.extended.update(3.0, lambda w: w)
    with pytest.raises(ContextError, match="Variable 'v' belongs to"):
        theirs.extended.update(v, lambda w: w.assign(1.0))
    with theirs.scope(), pytest.raises(ContextError, match="Mixing different"):
        ours.extended.update(v, lambda w: w.assign(1.0))
    with pytest.raises(VariableError, match="'v': Shape mismatch"):
        ours.extended.update(v, lambda w: w.assign(np.ones(3)))


def test_under_the_default_strategy():
    v = distrib.Variable(2.0)
    extended = distrib.get_strategy().extended
    assert float(extended.update(v, lambda w, x: w.assign_add(x), args=(3.0,))) == 5
    assert float(v.numpy()) == 5


def test_value_container():
    strategy = mirrored(2)
    v = made(strategy)
    container = strategy.extended.value_container
    first, second = v.values
    assert container(first) is container(second) is container(v) is v
    seen = strategy.extended.update(v, lambda w: container(w) is v, group=False)
    assert seen == (True,)
    x, other = ids(strategy), jnp.ones(1)
    assert container(x) is x and container(other) is other and container(1.5) == 1.5
