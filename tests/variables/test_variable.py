import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import ContextError, NestedTraceError, VariableError
from distrib.variables import live_variables
from tests.conformance.table import central, mirrored, rid, variable

ON_READ = distrib.VariableSynchronization.ON_READ
MEAN = distrib.VariableAggregation.MEAN
SUM = distrib.VariableAggregation.SUM


def one_device():
    return distrib.OneDeviceStrategy("CPU:2")


on_each = pytest.mark.parametrize(
    "make",
    [mirrored, central, one_device, distrib.get_strategy],
    ids=["Mirrored", "CentralStorage", "OneDevice", "default"],
)


@on_each
def test_what_a_variable_is(make):
    v = variable(make(), [[1, 2, 3]], dtype=jnp.float32, name="kernel")
    assert (v.name, v.shape, v.ndim, v.size, v.dtype) == ("kernel", (1, 3), 2, 3, jnp.float32)
    assert v.trainable
    assert v.synchronization is distrib.VariableSynchronization.ON_WRITE
    assert v.aggregation is distrib.VariableAggregation.NONE
    np.testing.assert_array_equal(v.numpy(), [[1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(np.asarray(v), [[1.0, 2.0, 3.0]])


@on_each
def test_assign_outside_of_replicas(make):
    v = variable(make(), [1.0, 2.0])
    v.assign([3.0, 4.0])
    np.testing.assert_array_equal(v.numpy(), [3.0, 4.0])
    v.assign_add(np.array([1.0, 1.0], np.float32))
    v.assign_sub(jnp.array([0.5, 0.5]))
    np.testing.assert_array_equal(v.numpy(), [3.5, 4.5])
    for copy in v.values:
        np.testing.assert_array_equal(copy, [3.5, 4.5])


@on_each
def test_assign_returns_the_new_value(make):
    v = variable(make(), 1.0)
    assert float(v.assign(2.0)) == 2.0
    assert float(v.assign_add(1.0)) == 3.0
    assert float(v.assign_sub(4.0)) == -1.0


@on_each
def test_a_step_reads_what_it_assigned_before(make):
    strategy = make()
    v = variable(strategy, 1.0, aggregation=MEAN)

    def step():
        before = v.value()
        v.assign_add(jnp.float32(1))
        between = v.value()
        v.assign(between * 10)
        return before, between, v.value()

    result = strategy.run(step)
    values = [float(strategy.experimental_local_results(x)[-1]) for x in result]
    assert values == [1.0, 2.0, 20.0]
    assert float(v.numpy()) == 20.0


def test_where_the_copies_are():
    cpu = jax.devices("cpu")
    assert [x.devices() for x in variable(mirrored(3)).values] == [{d} for d in cpu[:3]]
    assert [x.devices() for x in variable(one_device()).values] == [{cpu[2]}]
    strategy = distrib.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:5")
    v = variable(strategy)
    assert [x.devices() for x in v.values] == [{cpu[5]}]
    assert v.device == "/job:localhost/replica:0/task:0/device:CPU:5"


def test_on_read_copies_are_on_their_devices():
    v = variable(mirrored(3), 0.0, synchronization=ON_READ, aggregation=SUM)
    assert [x.devices() for x in v.values] == [{d} for d in jax.devices("cpu")[:3]]


def test_initial_values():
    strategy = mirrored()
    assert variable(strategy, 1).dtype == jnp.int32
    assert variable(strategy, 1.5).dtype == jnp.float32
    assert variable(strategy, True).dtype == jnp.bool_
    assert variable(strategy, np.ones(2, np.float16)).dtype == jnp.float16
    assert variable(strategy, 1, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert variable(strategy, lambda: jnp.ones(3)).shape == (3,)
    other = variable(strategy, [4.0, 5.0])
    np.testing.assert_array_equal(variable(strategy, other).numpy(), [4.0, 5.0])
    mirrored_value = other.assign([6.0, 7.0])
    np.testing.assert_array_equal(variable(strategy, mirrored_value).numpy(), [6.0, 7.0])


def test_assign_a_variable_to_a_variable():
    strategy = mirrored()
    v, w = variable(strategy, 1.0, aggregation=MEAN), variable(strategy, 5.0)
    v.assign(w)
    assert float(v.numpy()) == 5.0
    strategy.run(lambda: v.assign_add(w))
    assert float(v.numpy()) == 10.0


def test_assign_a_distributed_value_gives_each_copy_its_component():
    v = variable(mirrored(), 0.0)
    v.assign(distrib.PerReplica([jnp.float32(1), jnp.float32(2)]))
    assert [float(x) for x in v.values] == [1.0, 2.0]


@pytest.mark.parametrize("synchronization", [ON_READ, distrib.VariableSynchronization.ON_WRITE])
@pytest.mark.parametrize("inside", [False, True])
def test_wrong_shapes_are_refused(synchronization, inside):
    strategy = mirrored()
    v = variable(strategy, [1.0, 2.0], name="w", synchronization=synchronization, aggregation=MEAN)
    wanted = r"'w': Shape mismatch. The variable shape \(2,\), and the assigned value shape \(3,\)"
    with pytest.raises(VariableError, match=wanted):
        if inside:
            strategy.run(lambda: v.assign(jnp.ones(3)))
        else:
            v.assign(jnp.ones(3))
    np.testing.assert_array_equal(v.numpy(), [1.0, 2.0])


def test_dtypes_that_lose_information_are_refused():
    v = variable(mirrored(), 1, name="count")
    with pytest.raises(
        VariableError, match=r"dtype is int32, .* float32 would lose.*astype\('int32'\)"
    ):
        v.assign(jnp.float32(1.5))
    v.assign(np.int8(3))
    assert v.numpy() == 3
    assert v.numpy().dtype == np.int32


def test_a_half_takes_a_python_number():
    v = variable(mirrored(), jnp.float16(1))
    v.assign(2.5)
    assert (float(v.numpy()), v.dtype) == (2.5, jnp.float16)


def test_grad_of_a_variable_as_argument():
    v = variable(mirrored(), [1.0, 2.0])
    np.testing.assert_array_equal(jax.grad(lambda w: (w * w).sum())(v), [2.0, 4.0])
    np.testing.assert_array_equal(jax.jit(lambda w: w + 1)(v), [2.0, 3.0])


def test_grad_in_a_step():
    strategy = mirrored()
    v = variable(strategy, [1.0, 2.0], aggregation=MEAN)

    def step():
        loss, gradient = jax.value_and_grad(lambda w: (w * w).sum() * (rid() + 1))(v.value())
        v.assign_sub(0.1 * gradient)
        return loss

    assert [float(x) for x in strategy.run(step).values] == [5.0, 10.0]
    # The mean of the gradients (2, 4) and (4, 8) is (3, 6).
    np.testing.assert_allclose(v.numpy(), [0.7, 1.4], rtol=1e-6)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda assign: jax.jit(assign)(1.0),
        lambda assign: jax.grad(lambda x: assign(x) or x)(1.0),
        lambda assign: jax.lax.cond(True, lambda: assign(1.0) or 0, lambda: 0),
        lambda assign: jax.vmap(lambda x: assign(x.sum()) or x)(jnp.ones(2)),
    ],
    ids=["jit", "grad", "cond", "vmap"],
)
def test_assigning_inside_a_transformation(transformed):
    strategy = mirrored()
    v = variable(strategy, 0.0, name="w", aggregation=MEAN)

    def assign(x):
        v.assign(jnp.asarray(x, jnp.float32))

    with pytest.raises(NestedTraceError, match="'w' was changed inside a JAX transformation"):
        strategy.run(lambda: transformed(assign))
    assert float(v.numpy()) == 0.0


def test_assigning_in_the_scope_of_another_strategy():
    v = variable(mirrored(), 0.0)
    with mirrored().scope(), pytest.raises(ContextError, match="Mixing different"):
        v.assign(1.0)


def test_reading_a_foreign_variable():
    v = variable(one_device(), 4.0)
    plain = distrib.Variable(5.0)
    result = mirrored().run(lambda: v + plain.value())
    assert [float(x) for x in result.values] == [9.0, 9.0]


def test_identity():
    v, w = variable(mirrored(), [1.0, 2.0]), variable(mirrored(), [1.0, 2.0])
    assert len({v, w}) == 2
    assert distrib.is_variable(v)
    assert not distrib.is_variable(v.value())
    assert v.distribute_strategy is not w.distribute_strategy


def test_live_variables_in_the_order_of_creation():
    strategy = mirrored()
    made = [variable(strategy, float(i)) for i in range(3)]
    assert all(a is b for a, b in zip(live_variables(strategy), made, strict=True))
    del made[1]
    gc.collect()
    assert [float(v.numpy()) for v in live_variables(strategy)] == [0.0, 2.0]


def test_a_step_does_not_keep_its_variables_alive():
    strategy = mirrored()
    v = variable(strategy, 1.0, aggregation=MEAN)

    def step(v):
        v.assign_add(1.0)

    strategy.run(step, args=(v,))
    gone = weakref.ref(v)
    del v
    gc.collect()
    assert gone() is None


def test_repr():
    v = variable(mirrored(), 1.5, name="w")
    assert repr(v) == "<distrib.Variable 'w' shape=() dtype=float32 {0: 1.5, 1: 1.5}>"
    seen = []
    v.distribute_strategy.run(lambda: seen.append(repr(v)))
    assert seen == ["<distrib.Variable 'w' shape=() dtype=float32 (inside a step)>"]


def test_the_new_value_need_not_be_read(engine):
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0, aggregation=distrib.VariableAggregation.MEAN)

    def step():
        return [change(jnp.float32(2), read_value=False) for change in (v.assign, v.assign_add)] + [
            v.assign_sub(jnp.float32(1), read_value=True)
        ]

    first, second, third = strategy.run(step)
    assert (first, second) == (None, None)
    assert [float(x) for x in third.values] == [3, 3]
    assert v.assign(5.0, read_value=False) is None
    assert float(v) == 5
