"""The algorithms behind an all-reduce: each adds one array over the replicas."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distrib
from distrib.collectives import SumsOverReplicas, one_sum
from distrib.errors import AggregationError
from tests.support import algorithms
from tests.support.algorithms import mirrored, per_replica, summed

ALGORITHMS = {name: make() for name, make in algorithms.ALGORITHMS.items()}
every_algorithm = pytest.mark.parametrize("ops", ALGORITHMS.values(), ids=ALGORITHMS)
MEAN = distrib.VariableAggregation.MEAN


@every_algorithm
@pytest.mark.parametrize("count", range(1, 9))
def test_every_replica_gets_the_sum_in_the_shape_and_dtype_of_its_value(ops, count):
    """Replica r brings 2^r, so that each sum says who is in it; bfloat16 holds 255 exactly."""
    strategy = mirrored(count, ops)
    forms = [((3, 5), dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.uint8, jnp.complex64)]
    forms += [(shape, jnp.float32) for shape in ((), (count,), (count + 1,), (2, 0))]

    def step(power):
        return [
            ops.sum_over_replicas(jnp.full(shape, power, dtype), count) for shape, dtype in forms
        ]

    sums = strategy.run(step, args=(per_replica(strategy, [2**r for r in range(count)]),))
    for (shape, dtype), total in zip(forms, sums, strict=True):
        for part in strategy.experimental_local_results(total):
            assert (part.shape, part.dtype) == (shape, dtype)
            np.testing.assert_array_equal(part, jnp.full(shape, 2**count - 1, dtype))


FORMS = st.tuples(
    st.sampled_from([(), (1,), (7,), (0,), (3, 5), (2, 0, 4), (4, 1, 3)]),
    st.sampled_from(["float32", "bfloat16", "float64", "int32", "int8", "int64"]),
)


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    count=st.integers(1, 8),
    forms=st.lists(FORMS, min_size=1, max_size=4),
    op=st.sampled_from(["SUM", "MEAN"]),
    seed=st.integers(0, 99),
)
def test_any_tree_is_reduced_and_all_copies_are_equal_bit_by_bit(name, count, forms, op, seed):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        strategy = mirrored(count, ALGORITHMS[name])
        trees = [rng.normal(0, 10, (count, *shape)).astype(jnp.dtype(d)) for shape, d in forms]

        def step(tree):
            return distrib.get_replica_context().all_reduce(op, tree)

        arguments = [per_replica(strategy, list(values)) for values in trees]
        results = strategy.run(step, args=(arguments,))
        results = [strategy.experimental_local_results(result) for result in results]
    for values, parts in zip(trees, results, strict=True):
        assert len({np.asarray(part).tobytes() for part in parts}) == 1
        assert parts[0].shape == values.shape[1:]
        integers = np.issubdtype(values.dtype, np.integer)
        if integers and op == "SUM":
            assert parts[0].dtype == values.dtype
            np.testing.assert_array_equal(parts[0], values.sum(0, dtype=values.dtype))
            continue
        assert parts[0].dtype == (np.float64 if integers else values.dtype)
        exact = values.astype(np.float64)
        expected = exact.sum(0) if op == "SUM" else exact.mean(0)
        bound = count * float(jnp.finfo(parts[0].dtype).eps) * np.abs(exact).sum(0)
        assert np.all(np.abs(np.asarray(parts[0], np.float64) - expected) <= bound + 1e-30)


@every_algorithm
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_booleans_are_refused(ops, op):
    strategy = mirrored(2, ops)
    with pytest.raises(AggregationError, match="cannot add values of dtype bool at"):
        strategy.run(lambda: distrib.get_replica_context().all_reduce(op, {"a": jnp.array(True)}))
    flags = distrib.PerReplica([jnp.array(True), jnp.array(False)])
    with pytest.raises(AggregationError, match="cannot add values of dtype bool"):
        strategy.reduce("SUM", flags, axis=None)


def largest(parts):
    return functools.reduce(jnp.maximum, parts)


@pytest.mark.parametrize("eagerly", [False, True])
def test_the_algorithm_is_that_of_every_reduction(eagerly):
    """The accumulation function takes the largest instead of adding."""
    distrib.config.run_functions_eagerly(eagerly)
    strategy = mirrored(3, distrib.ReductionToOneDevice(accumulation_fn=largest))
    with strategy.scope():
        total = distrib.Variable(0.0, aggregation=distrib.VariableAggregation.SUM)
        own = distrib.Variable(
            0.0,
            aggregation=distrib.VariableAggregation.SUM,
            synchronization=distrib.VariableSynchronization.ON_READ,
        )
    values = per_replica(strategy, list(np.float32([[1, 5], [4, 2], [3, 3]])))

    def step(x):
        def merge(current, y):
            return current.reduce("SUM", y, axis=None), own.value()

        total.assign_add(x[0])
        own.assign(x[1])
        gradient = jax.grad(lambda y: (summed(y) * x).sum())(x)
        context = distrib.get_replica_context()
        return summed(x), context.all_reduce("MEAN", x), gradient, context.merge_call(merge, (x,))

    sums, mean, gradient, (merged, inside) = strategy.run(step, args=(values,))
    distrib.config.run_functions_eagerly(False)
    for result, expected in ((sums, [4, 5]), (gradient, [4, 5]), (merged, [4, 5]), (inside, 5)):
        assert [x.tolist() for x in result.values] == [expected] * 3
    np.testing.assert_allclose(mean.values[2], [4 / 3, 5 / 3], rtol=1e-6)
    assert float(total.numpy()) == 4


def test_the_algorithm_is_that_of_reductions_in_cross_replica_context():
    strategy = mirrored(3, distrib.ReductionToOneDevice(accumulation_fn=largest))
    apart = distrib.PerReplica([np.float32([1, 5]), np.float32([4, 2]), np.float32([3, 3])])
    stacked = strategy.run(lambda x: x, args=(distrib.PerReplica(apart.values),))
    for value in (apart, stacked):
        assert strategy.reduce("SUM", value, axis=None).tolist() == [4, 5]
        assert strategy.extended.reduce_to("SUM", value, "CPU:0").tolist() == [4, 5]
        np.testing.assert_allclose(strategy.reduce("MEAN", value, None), [4 / 3, 5 / 3], rtol=1e-6)
        assert float(strategy.reduce("SUM", value, axis=0)) == 6
        assert float(strategy.reduce("MEAN", value, axis=0)) == pytest.approx(6 / (3 * 2))
    uneven = distrib.PerReplica([np.float32([1, 5]), np.float32([4]), np.float32([])])
    assert float(strategy.reduce("SUM", uneven, axis=0)) == 6
    assert float(strategy.reduce("MEAN", uneven, axis=0)) == 2


def test_booleans_have_a_mean_over_an_axis():
    strategy = mirrored(2)
    for parts in ([[True, False], [True, True]], [[True, False, True], [True]]):
        value = distrib.PerReplica([jnp.array(part) for part in parts])
        assert float(strategy.reduce("MEAN", value, axis=0)) == 0.75


@every_algorithm
@pytest.mark.parametrize("count", [3, 4])
def test_doubles_keep_their_precision(ops, count):
    with jax.enable_x64(True):
        strategy = mirrored(count, ops)
        values = [np.float64([1 + 2.0**-40, r]) for r in range(count)]
        parts = strategy.run(summed, args=(per_replica(strategy, values),)).values
    for part in parts:
        assert part.dtype == jnp.float64
        assert part.tolist() == [count + count * 2.0**-40, sum(range(count))]


@every_algorithm
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_the_gradient_is_the_sum_of_the_gradients(ops, count):
    """On replica r the loss is (r + 1) * sum, so the gradient is 1 + 2 + ... + n everywhere."""
    strategy = mirrored(count, ops)

    def step(r):
        return jax.grad(lambda x: (r + 1) * ops.sum_over_replicas(x, count).sum())(jnp.ones(3))

    ids = per_replica(strategy, [jnp.float32(r) for r in range(count)])
    for gradient in strategy.run(step, args=(ids,)).values:
        assert gradient.tolist() == [count * (count + 1) / 2] * 3


@every_algorithm
def test_the_gradient_through_a_loss_that_is_not_linear(ops):
    """The loss (sum over replicas of w x)^2 at w=2, x=(1, 3): d/dw = 2*(2*4) * 2 * x."""
    strategy = mirrored(2, ops)

    def step(x):
        return jax.grad(lambda w: ops.sum_over_replicas(w * x, 2) ** 2)(jnp.float32(2))

    gradients = strategy.run(step, args=(per_replica(strategy, np.float32([1, 3])),)).values
    assert [float(g) for g in gradients] == [32, 96]


@every_algorithm
def test_an_all_reduce_stands_inside_of_transformations(ops):
    strategy = mirrored(3, ops)

    def step(r):
        rows = jax.vmap(lambda x: ops.sum_over_replicas(x * r, 3))(jnp.arange(4.0))
        again = jax.checkpoint(lambda x: ops.sum_over_replicas(x, 3))(r)
        looped, _ = jax.lax.scan(
            lambda c, x: (c + ops.sum_over_replicas(x * r, 3), None), 0.0, jnp.arange(3.0)
        )
        return rows, again, looped, jax.jit(lambda x: ops.sum_over_replicas(x, 3))(r)

    results = strategy.run(step, args=(per_replica(strategy, np.float32([1, 2, 4])),))
    for rows, again, looped, jitted in zip(*(r.values for r in results), strict=True):
        assert rows.tolist() == [0, 7, 14, 21]
        assert (float(again), float(looped), float(jitted)) == (7, 21, 7)


@every_algorithm
def test_a_loss_may_count_with_integers(ops):
    strategy = mirrored(2, ops)

    def step(w):
        def loss(w):
            return w * summed((w > 1).astype(jnp.int32))

        return jax.grad(loss)(w), jax.grad(jax.grad(lambda w: summed(w * w) ** 2))(w)

    once, twice = strategy.run(step, args=(per_replica(strategy, np.float32([3, 0.5])),))
    assert [float(x) for x in once.values] == [1, 1]
    # s = a^2 + b^2; the gradient on a replica is 2 * (2 s) * 2 a = 8 a s, whose own derivative,
    # with what the other replica's 8 b s adds, is 8 s + 16 a (a + b).
    a, b = 3, 0.5
    s = a * a + b * b
    np.testing.assert_allclose(twice.values, [8 * s + 16 * x * (a + b) for x in (a, b)], rtol=1e-6)


def compiled(count, ops):
    strategy = mirrored(count, ops)
    values = per_replica(strategy, [np.ones(16, np.float32)] * count)
    return strategy.extended.compiled_text(summed, args=(values,))


def calls(text, collective):
    return text.count(f" {collective}(") + text.count(f" {collective}-start(")


def test_the_algorithm_decides_what_is_compiled():
    kinds = ("all-reduce", "all-gather", "collective-permute")
    counted = {
        name: [calls(compiled(4, ops), kind) for kind in kinds] for name, ops in ALGORITHMS.items()
    }
    assert counted == {
        "nccl": [1, 0, 0],
        "one-device": [0, 1, 0],
        "hierarchical": [2, 0, 0],
        "ring": [0, 0, 6],
    }
    text = compiled(4, distrib.HierarchicalCopyAllReduce())
    assert "replica_groups={{0,1},{2,3}}" in text
    assert "replica_groups={{0,2},{1,3}}" in text


@every_algorithm
@pytest.mark.parametrize("count", [3, 8])
def test_copies_stay_equal_bit_by_bit_over_steps(ops, count):
    strategy = mirrored(count, ops)
    data = np.random.default_rng(0).normal(size=(8 * count, 5)).astype(np.float32)
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=None, params={"w": jnp.ones((5, 3)), "b": 0.5}, tx=optax.adam(0.1)
        )

    def loss(params, x):
        return ((jnp.tanh(x @ params["w"]) * params["b"] - 1) ** 2).mean()

    def step(x):
        state.apply_gradients(grads=jax.grad(loss)(state.params, x))

    single = {"w": jnp.ones((5, 3)), "b": 0.5}
    tx = optax.adam(0.1)
    moments = tx.init(single)
    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset([data]):
            strategy.run(step, args=(batch,))
        updates, moments = tx.update(jax.grad(loss)(single, data), moments, single)
        single = optax.apply_updates(single, updates)
    strategy.extended.assert_mirrored(state)
    np.testing.assert_allclose(state.params["w"], single["w"], rtol=1e-4, atol=1e-5)


def uneven_step(count, ops):
    """Run a step with 5 examples: one replica of 3 has fewer, and the last one of 4 has none."""
    strategy = mirrored(count, ops)
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=None, params={"w": 1.5}, tx=optax.sgd(0.01))
        v = distrib.Variable(0.0, aggregation=MEAN)

    def step(x):
        def loss(w):
            return ((w * x - summed(w * x.sum()) / 5) ** 2 * x).sum()

        total = summed(x.sum())
        state.apply_gradients(grads={"w": (x * total).mean()})
        v.assign(total + x.sum())
        return total, jax.grad(loss)(1.5), summed(x.sum() / x.shape[0])

    (batch,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 3, 10, 20])])
    total, gradient, means = strategy.run(step, args=(batch,))
    strategy.extended.assert_mirrored([state, v])
    return total.values, gradient.values, means.values, state.params["w"], v.numpy()


@every_algorithm
@pytest.mark.parametrize(("count", "sum_of_means"), [(3, 28), (4, 28)])
def test_uneven_batches_give_the_numbers_of_one_device(ops, count, sum_of_means):
    total, gradient, means, w, v = uneven_step(count, ops)
    assert [float(x) for x in total] == [36] * count
    assert [float(x) for x in means] == [sum_of_means] * count  # 1.5 + 6.5 + 20, no NaN
    np.testing.assert_allclose(w, 1.5 - 0.01 * 36 * 7.2, rtol=1e-5)
    np.testing.assert_allclose(v, 36 + 36 / count, rtol=1e-6)
    expected = uneven_step(count, distrib.NcclAllReduce())[1]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@every_algorithm
def test_uneven_arrays_do_not_meet(ops):
    strategy = mirrored(2, ops)
    (batch,) = strategy.experimental_distribute_dataset([np.arange(3.0)])
    with pytest.raises(AggregationError, match=r"float32\[2\], float32\[1\]"):
        strategy.run(summed, args=(batch,))


@every_algorithm
def test_nnx_objects_that_are_changed_by_the_sum(ops):
    strategy = mirrored(3, ops)
    layer = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.ones((2, 1)))
    optimizer = nnx.Optimizer(layer, optax.sgd(0.5), wrt=nnx.Param)

    def step(layer, optimizer, x):
        grads = nnx.grad(lambda m: m(x).mean())(layer)
        optimizer.update(layer, summed(grads))

    inputs = [np.float32([[r, 1]]) for r in range(3)]
    strategy.run(step, args=(layer, optimizer, per_replica(strategy, inputs)))
    np.testing.assert_allclose(layer.kernel[...], [[1 - 0.5 * 3], [1 - 0.5 * 3]])


def test_one_device_adds_in_the_order_of_the_replicas():
    """In float32, (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1."""
    strategy = mirrored(3, distrib.ReductionToOneDevice())
    for values, expected in (([1e8, 1, -1e8], 0), ([1e8, -1e8, 1], 1)):
        result = strategy.run(summed, args=(per_replica(strategy, np.float32(values)),))
        assert [float(x) for x in result.values] == [expected] * 3


def test_the_accumulation_function_gets_the_list_of_the_replicas_arrays():
    seen = []

    def accumulate(arrays):
        seen.append([array.shape for array in arrays])
        return jnp.maximum(jnp.maximum(arrays[0], arrays[1]), arrays[2])

    ops = distrib.ReductionToOneDevice("CPU:1", accumulate)
    strategy = mirrored(3, ops)

    def step(x):
        context = distrib.get_replica_context()
        return context.all_reduce("SUM", x), context.all_reduce("MEAN", x)

    total, mean = strategy.run(step, args=(per_replica(strategy, np.float32([[1], [2], [4]])),))
    assert set(map(tuple, seen)) == {((1,),) * 3}
    assert [x.tolist() for x in total.values] == [[4]] * 3
    np.testing.assert_allclose(mean.values, [[4 / 3]] * 3)


def test_arguments_are_checked():
    with pytest.raises(distrib.errors.DeviceError, match="There is no device 'CPU:8'"):
        distrib.ReductionToOneDevice("CPU:8")
    with pytest.raises(distrib.errors.DeviceError, match="is not a device"):
        distrib.ReductionToOneDevice(sum)
    with pytest.raises(ValueError, match="HierarchicalCopy requires num_packs >= 0, but -1 is"):
        distrib.HierarchicalCopyAllReduce(num_packs=-1)
    with pytest.raises(ValueError, match="requires num_packs >= 0, but -2 is"):
        distrib.NcclAllReduce(-2)
    distrib.HierarchicalCopyAllReduce(num_packs=0)
    distrib.NcclAllReduce(num_packs=0)


@every_algorithm
def test_numbers_of_tf_distribute(ops):
    """The values of cdo-one-3 and cdo-hier-3; its all_reduce of the hierarchical copy lost some."""
    strategy = mirrored(3, ops)
    values = per_replica(strategy, np.float32([1, 2, 4]))

    def step(x):
        context = distrib.get_replica_context()
        mean_id = context.all_reduce("MEAN", jnp.float32(context.replica_id_in_sync_group))
        return mean_id, context.all_reduce("SUM", x), context.all_gather(x[None], axis=0)

    mean_id, total, gathered = strategy.run(step, args=(values,))
    assert [float(x) for x in mean_id.values] == [1] * 3
    assert [float(x) for x in total.values] == [7] * 3
    assert [x.tolist() for x in gathered.values] == [[1, 2, 4]] * 3
    assert float(strategy.reduce("SUM", values, axis=None)) == 7


class Doubled:
    """A user's own algorithm needs no base class."""

    def sum_over_replicas(self, value, num_replicas):
        return 2 * jax.lax.psum(value, distrib.REPLICA_AXIS)


class Swapped:
    """For two replicas; the engines see one sum."""

    def sum_over_replicas(self, value, num_replicas):
        swap = [(0, 1), (1, 0)]
        return one_sum(lambda x: x + jax.lax.ppermute(x, distrib.REPLICA_AXIS, swap), value)


@pytest.mark.parametrize(("ops", "expected"), [(Doubled(), 12), (Swapped(), 6)])
def test_an_algorithm_is_whatever_has_the_method(ops, expected):
    assert isinstance(ops, SumsOverReplicas)
    strategy = mirrored(2, ops)
    (batch,) = strategy.experimental_distribute_dataset([np.arange(4.0)[1:]])  # 2 and 1 examples
    result = strategy.run(lambda x: summed(x.sum()), args=(batch,))
    assert [float(x) for x in result.values] == [expected] * 2


def test_the_algorithms_of_distrib_are_algorithms():
    assert all(isinstance(ops, distrib.CrossDeviceOps) for ops in ALGORITHMS.values())
    assert not isinstance("nccl", SumsOverReplicas)
