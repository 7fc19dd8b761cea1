"""Where the variables of a step are, and who applies its updates."""

import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib.engines.deferred_updates import DeferredUpdate
from distrib.engines.placement import InProgram, OnOneDevice, fetch
from distrib.engines.program import Update
from distrib.platform import replica_mesh, replicated
from tests.support.strategies import mirrored

HOME, FIRST, SECOND = 7, 1, 2
CPUS = jax.devices("cpu")
SUM = distrib.VariableAggregation.SUM


def central():
    return distrib.CentralStorageStrategy([f"CPU:{FIRST}", f"CPU:{SECOND}"], f"CPU:{HOME}")


def ids(array):
    return {device.id for device in array.devices()}


def adam_state(strategy):
    """Three parameters and Adam: 2 x 3 moments and a count, which lengths tell apart."""
    with strategy.scope():
        params = {"a": jnp.ones(31), "b": jnp.ones((31, 3)), "c": jnp.ones(())}
        return distrib.TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))


def training_step(state):
    def step(x):
        def loss(p):
            return ((p["a"].sum() + p["b"].sum() + p["c"]) * x).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        state.apply_gradients(grads=grads)
        return value

    return step


def entry_parameters(text):
    """Return the shapes of the inputs of a compiled program."""
    entry = text[text.index("\nENTRY ") :]
    return sorted(re.findall(r"= (\w+\[[\d,]*\])\S* parameter\(", entry))


# CentralStorage: the optimizer state never leaves the parameter device.


def test_everything_that_a_train_state_holds_stays_on_the_parameter_device():
    strategy = central()
    state = adam_state(strategy)
    step = training_step(state)
    for _ in range(3):
        strategy.run(step, args=(jnp.ones(2),))
    arrays = [v.storage.cell.array for v in state.distributed_variables()]
    assert len(arrays) == 3 + 7 + 1  # parameters, Adam, the step count
    assert [ids(array) for array in arrays] == [{HOME}] * len(arrays)
    assert int(state.step) == 3
    assert [ids(leaf) for leaf in jax.tree.leaves(state.opt_state)] == [{HOME}] * 7


def test_the_program_of_the_replicas_takes_parameters_and_no_optimizer_state():
    strategy = central()
    state = adam_state(strategy)
    text = strategy.extended.compiled_text(training_step(state), (jnp.ones(2),))
    assert entry_parameters(text) == ["f32[2]", "f32[31,3]", "f32[31]", "f32[]"]
    whole = mirrored(2)
    everything = adam_state(whole)
    text = whole.extended.compiled_text(training_step(everything), (jnp.ones(2),))
    assert len(entry_parameters(text)) == 1 + 3 + 7 + 1


def test_nothing_is_left_behind_on_the_replicas():
    strategy = central()
    state = adam_state(strategy)
    step = training_step(state)

    def left():
        gc.collect()
        return sorted(x.shape for x in jax.live_arrays() if ids(x) & {FIRST, SECOND})

    before = left()
    for _ in range(2):
        strategy.run(step, args=(jnp.ones(2),))
    assert left() == before


def test_the_numbers_are_those_of_mirrored():
    results = []
    for strategy in (central(), mirrored(2)):
        state = adam_state(strategy)
        step = training_step(state)
        for i in range(4):
            strategy.run(step, args=(jnp.array([1.0, 2.0 + i]),))
        results.append(jax.device_get((state.params, state.opt_state)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *results)


# The parts.


def test_arrays_of_the_mesh_are_given_as_they_are():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(jnp.ones(3))
    for get in (
        fetch([v], strategy.extended.mesh),
        InProgram().fetcher([v], strategy.extended.mesh),
    ):
        assert get()[0] is v.storage.cell.array
    v.assign(jnp.zeros(3))
    assert get()[0] is v.storage.cell.array  # of the variable, not of its first value


def test_arrays_that_are_elsewhere_are_copied_to_the_mesh():
    with central().scope():
        placed = distrib.Variable(jnp.arange(3.0))
    with distrib.MirroredStrategy(["CPU:3", "CPU:4"]).scope():
        copied = distrib.Variable(jnp.arange(2.0))
    mesh = replica_mesh(CPUS[1:3])
    for array, expected in zip(fetch([placed, copied], mesh)(), ([0, 1, 2], [0, 1]), strict=True):
        assert array.sharding == replicated(mesh)
        assert [shard.data.tolist() for shard in array.addressable_shards] == [expected] * 2


def test_own_and_foreign_variables_keep_their_order():
    strategy = mirrored(2)
    mesh = strategy.extended.mesh
    outside = distrib.Variable(1.0)
    with strategy.scope():
        first, last = distrib.Variable(0.0), distrib.Variable(2.0)
    arrays = InProgram().fetcher([first, outside, last], mesh)()
    assert [float(array.addressable_shards[0].data) for array in arrays] == [0, 1, 2]
    assert arrays[0] is first.storage.cell.array
    assert arrays[2] is last.storage.cell.array
    assert arrays[1].sharding == replicated(mesh)


def test_in_the_program_nothing_is_left_to_apply():
    placement = InProgram()
    assert not placement.deferred
    assert placement.applier([], []) is None


def updates_of(v, w):
    """Return v <- v + x, then w <- v * y, which sees the new v."""
    tree = jax.tree.structure
    return [
        DeferredUpdate(Update((v,), lambda olds, x: [olds[0] + x], None), tree(0), (None,)),
        DeferredUpdate(
            Update((v, w), lambda olds, y: [olds[0], olds[0] * y["y"]], None),
            tree({"y": 0}),
            (None,),
        ),
    ]


def test_the_device_applies_updates_in_order():
    placement = OnOneDevice(CPUS[HOME])
    assert placement.deferred
    with central().scope():
        v, w = distrib.Variable(jnp.ones(2), name="v"), distrib.Variable(jnp.zeros(2), name="w")
    form = jax.ShapeDtypeStruct((2,), jnp.float32)
    apply = placement.applier(updates_of(v, w), [form, form])
    held = w.value()
    everywhere = replicated(replica_mesh(CPUS[1:3]))
    for expected in ([3, 6], [5, 10]):
        apply([jax.device_put(np.full(2, n, np.float32), everywhere) for n in (2, 2)])
        assert [v.numpy().tolist(), w.numpy().tolist()] == [[n] * 2 for n in expected]
    assert ids(v.storage.cell.array) == {HOME}
    assert held.tolist() == [0, 0]  # what the user holds is not given away
    assert placement.applier([], []) is None


def test_old_values_that_nobody_holds_are_given_to_the_new():
    strategy = central()
    with strategy.scope():
        v = distrib.Variable(jnp.ones(2), aggregation=SUM)
    old = v.storage.cell.array
    strategy.run(lambda: v.assign_add(jnp.ones(2)))
    assert old.is_deleted()
    assert v.numpy().tolist() == [3, 3]


def test_an_update_that_changes_the_shape_is_refused():
    with central().scope():
        v = distrib.Variable(jnp.ones(2), name="v")
    bad = Update((v,), lambda olds, x: [jnp.ones(3)], None)
    with pytest.raises(distrib.errors.VariableError, match="'v': Shape mismatch"):
        OnOneDevice(CPUS[HOME]).applier(
            [DeferredUpdate(bad, jax.tree.structure(0), (None,))],
            [jax.ShapeDtypeStruct((2,), jnp.float32)],
        )
