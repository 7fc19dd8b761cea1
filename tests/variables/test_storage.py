"""Where values live, and that a step which is given a buffer spares what the user holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.platform import mesh as meshes
from distrib.variables import Cell, LentCells, own_copy
from tests.conformance.table import central, mirrored, outcome, rid, variable

MEAN, SUM = distrib.VariableAggregation.MEAN, distrib.VariableAggregation.SUM
ON_READ = distrib.VariableSynchronization.ON_READ

on_each = pytest.mark.parametrize(
    "make",
    [mirrored, central, lambda: distrib.OneDeviceStrategy("CPU:1")],
    ids=["Mirrored", "CentralStorage", "OneDevice"],
)


def add_one(v):
    v.assign_add(jnp.ones(v.shape, v.dtype))


@on_each
def test_a_value_read_before_a_step_stays_usable(make):
    strategy = make()
    v = variable(strategy, [1.0, 2.0], aggregation=MEAN)
    for i in range(3):
        before = v.value()
        strategy.run(add_one, args=(v,))
        np.testing.assert_array_equal(before, [1.0 + i, 2.0 + i])
    np.testing.assert_array_equal(v.numpy(), [4.0, 5.0])


@on_each
def test_values_are_snapshots(make):
    strategy = make()
    v = variable(strategy, [1.0, 2.0], aggregation=MEAN)
    for i in range(3):
        copies = v.values
        strategy.run(add_one, args=(v,))
        for copy in copies:
            np.testing.assert_array_equal(copy, [1.0 + i, 2.0 + i])


@pytest.mark.parametrize("aggregation", [SUM, MEAN])
def test_on_read_values_are_snapshots(aggregation):
    strategy = mirrored()
    v = variable(strategy, 1.0, synchronization=ON_READ, aggregation=aggregation)
    copies, total = v.values, v.value()
    strategy.run(lambda: v.assign_add(rid()))
    assert [float(x) for x in copies] == [1.0, 1.0]
    assert float(total) == (2.0 if aggregation is SUM else 1.0)
    assert [float(x) for x in v.values] == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.bfloat16])
def test_an_on_read_sum_has_the_dtype_of_the_variable(dtype):
    v = variable(mirrored(), jnp.asarray(3, dtype), synchronization=ON_READ, aggregation=SUM)
    assert (float(v.read_value()), v.read_value().dtype) == (6.0, dtype)


@on_each
def test_what_assign_returned_stays_usable(make):
    strategy = make()
    v = variable(strategy, [1.0, 2.0], aggregation=MEAN)
    returned = v.assign([5.0, 6.0])
    strategy.run(add_one, args=(v,))
    np.testing.assert_array_equal(np.asarray(returned), [5.0, 6.0])
    np.testing.assert_array_equal(v.numpy(), [6.0, 7.0])


@on_each
def test_what_a_step_returned_stays_usable(make):
    strategy = make()
    v = variable(strategy, 0.0, aggregation=MEAN)

    def step():
        add_one(v)
        return v.value()

    results = [strategy.run(step) for _ in range(4)]
    read = [float(strategy.experimental_local_results(r)[-1]) for r in results]
    assert read == [1.0, 2.0, 3.0, 4.0]


@on_each
@pytest.mark.parametrize("assigned", [False, True])
def test_the_initial_array_is_not_given_away(make, assigned):
    strategy = make()
    # Lying where the strategy would put it, so that putting it there copies nothing.
    where = jax.devices("cpu")[1] if isinstance(strategy, distrib.OneDeviceStrategy) else None
    initial = jax.device_put(jnp.array([1.0, 2.0]), where)
    if assigned:
        v = variable(strategy, jnp.zeros(2), aggregation=MEAN)
        v.assign(initial)
    else:
        v = variable(strategy, initial, aggregation=MEAN)
    for _ in range(2):
        strategy.run(add_one, args=(v,))
    np.testing.assert_array_equal(initial, [1.0, 2.0])
    np.testing.assert_array_equal(v.numpy(), [3.0, 4.0])


@on_each
def test_an_initial_array_that_lies_on_the_mesh_already(make):
    strategy = make()
    initial = jax.device_put(jnp.array([1.0, 2.0]), meshes.replicated(strategy.extended.mesh))
    v = variable(strategy, initial, aggregation=MEAN)
    strategy.run(add_one, args=(v,))
    np.testing.assert_array_equal(initial, [1.0, 2.0])


@on_each
@pytest.mark.parametrize("kind", [np.array, jnp.array])
def test_two_variables_from_one_array(make, kind):
    strategy = make()
    initial = kind([1.0, 2.0], dtype=np.float32)
    v = variable(strategy, initial, aggregation=MEAN)
    w = variable(strategy, initial, aggregation=MEAN)
    strategy.run(add_one, args=(v,))
    np.testing.assert_array_equal(w.numpy(), [1.0, 2.0])

    def both():
        add_one(v)
        w.assign_sub(jnp.ones(2))

    strategy.run(both)
    np.testing.assert_array_equal(v.numpy(), [3.0, 4.0])
    np.testing.assert_array_equal(w.numpy(), [0.0, 1.0])
    np.testing.assert_array_equal(initial, [1.0, 2.0])


@on_each
def test_a_numpy_array_may_be_reused_after_it_was_assigned(make):
    buffer = np.ones(64, np.float32)
    v = variable(make(), buffer)
    buffer[:] = 7
    np.testing.assert_array_equal(v.numpy(), np.ones(64))
    v.assign(buffer)
    buffer[:] = 9
    np.testing.assert_array_equal(v.numpy(), np.full(64, 7.0))


@on_each
def test_one_variable_assigned_to_another_shares_nothing(make):
    strategy = make()
    v = variable(strategy, [1.0, 2.0], aggregation=MEAN)
    w = variable(strategy, v, aggregation=MEAN)
    u = variable(strategy, [0.0, 0.0])
    u.assign(v)
    strategy.run(add_one, args=(v,))
    for other in (w, u):
        np.testing.assert_array_equal(other.numpy(), [1.0, 2.0])


def test_a_step_that_writes_what_nobody_holds_reuses_its_buffer():
    strategy = mirrored()
    v = variable(strategy, np.ones(1000, np.float32), aggregation=MEAN)
    strategy.run(add_one, args=(v,))
    before = v.storage.cell.array
    strategy.run(add_one, args=(v,))
    assert before.is_deleted()


def test_numpy_and_repr_of_a_variable_do_not_disturb_later_steps():
    strategy = mirrored()
    v = variable(strategy, 0.0, aggregation=MEAN)
    for i in range(3):
        assert float(v.numpy()) == i
        repr(v)
        strategy.run(add_one, args=(v,))


def test_cells_remember_what_they_lent():
    cell, other = Cell(jnp.ones(2)), Cell(jnp.ones(2))
    watched = LentCells([cell, other])
    watched.copy_lent()
    lent, kept = cell.lend(), other.array
    watched.copy_lent()
    assert cell.array is not lent
    assert other.array is kept
    assert not cell.lent
    copied = cell.array
    watched.copy_lent()
    assert cell.array is copied


def test_own_copy_never_aliases():
    sharding = meshes.replicated(meshes.replica_mesh(jax.devices("cpu")[:2]))
    given = jax.device_put(jnp.arange(4.0), sharding)
    copy = own_copy(given, sharding)
    mine = {shard.data.unsafe_buffer_pointer() for shard in given.addressable_shards}
    assert mine.isdisjoint(s.data.unsafe_buffer_pointer() for s in copy.addressable_shards)


def test_on_read_assign_shares_out_a_sum():
    v = variable(mirrored(4), 0.0, synchronization=ON_READ, aggregation=SUM)
    v.assign(6.0)
    assert [float(x) for x in v.values] == [1.5] * 4
    assert float(v.numpy()) == 6.0


def test_on_read_mean_takes_the_value_on_every_copy():
    v = variable(mirrored(), 0.0, synchronization=ON_READ, aggregation=MEAN)
    v.assign(6.0)
    v.assign_add(1.0)
    assert [float(x) for x in v.values] == [7.0, 7.0]


@pytest.mark.parametrize("method", ["assign_add", "assign_sub"])
def test_on_read_sum_refuses_to_add_outside_of_replicas(method):
    v = variable(mirrored(), 0.0, name="total", synchronization=ON_READ, aggregation=SUM)
    with pytest.raises(
        distrib.errors.VariableError, match="'total' is ON_READ with aggregation=SUM"
    ):
        getattr(v, method)(1.0)


def test_on_read_takes_components():
    v = variable(mirrored(), 0.0, synchronization=ON_READ, aggregation=SUM)
    v.assign(distrib.PerReplica([np.float32(1), np.float32(2)]))
    assert [float(x) for x in v.values] == [1.0, 2.0]


def test_an_on_read_variable_of_one_replica_is_plain():
    v = variable(distrib.OneDeviceStrategy("CPU:0"), 2.0, synchronization=ON_READ, aggregation=SUM)
    v.assign_add(1.0)
    assert float(v.numpy()) == 3.0


def test_a_step_that_fails_leaves_the_variables_as_they_were():
    strategy = mirrored()
    v = variable(strategy, 1.0, aggregation=MEAN)

    def step():
        v.assign_add(jnp.float32(1))
        raise KeyError("boom")

    assert isinstance(outcome(lambda: strategy.run(step)).error, KeyError)
    assert float(v.numpy()) == 1.0
    strategy.run(add_one, args=(v,))
    assert float(v.numpy()) == 2.0
