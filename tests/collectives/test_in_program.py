from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.collectives import CommunicationOptions
from distrib.errors import AggregationError

SIZES = [1, 2, 3, 4, 8]


def mirrored(size: int, **kwargs: Any) -> distrib.MirroredStrategy:
    return distrib.MirroredStrategy([f"CPU:{i}" for i in range(size)], **kwargs)


def context() -> distrib.ReplicaContext:
    replica = distrib.get_replica_context()
    assert replica is not None
    return replica


def rid() -> Any:
    return jnp.asarray(context().replica_id_in_sync_group)


def components(strategy: distrib.Strategy, value: Any) -> list[Any]:
    return [np.asarray(part) for part in strategy.experimental_local_results(value)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ops", [distrib.NcclAllReduce(), distrib.ReductionToOneDevice()])
def test_all_reduce_values(size, ops):
    strategy = mirrored(size, cross_device_ops=ops)

    def step():
        x = (rid() + 1.0) * jnp.array([1.0, 10.0])
        return context().all_reduce("SUM", x), context().all_reduce("MEAN", x)

    total, mean = strategy.run(step)
    expected = size * (size + 1) / 2 * np.array([1.0, 10.0])
    assert len(components(strategy, total)) == size
    for part in components(strategy, total):
        np.testing.assert_allclose(part, expected, rtol=1e-6)
    for part in components(strategy, mean):
        np.testing.assert_allclose(part, expected / size, rtol=1e-6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ops", [distrib.NcclAllReduce(), distrib.ReductionToOneDevice()])
def test_all_reduce_gradients(size, ops):
    """The gradient of an all-reduce is the all-reduce of the gradients, as in tf.distribute."""
    strategy = mirrored(size, cross_device_ops=ops)

    def step(op):
        # On replica i the loss is (i + 1) * all_reduce(w), so the incoming gradient is i + 1.
        return jax.grad(lambda w: (rid() + 1.0) * context().all_reduce(op, w))(jnp.float32(2))

    for op, expected in (("SUM", size * (size + 1) / 2), ("MEAN", (size + 1) / 2)):
        for part in components(strategy, strategy.run(step, args=(op,))):
            np.testing.assert_allclose(part, expected, rtol=1e-6)


def test_the_gradient_that_the_design_measured():
    """With w = 2 and x = 1 and 3 the gradient is 32 and 96."""
    strategy = mirrored(2)
    x = distrib.PerReplica([jnp.float32(1), jnp.float32(3)])

    def step(x):
        return jax.grad(lambda w: context().all_reduce("SUM", w * x) ** 2)(jnp.float32(2))

    # all_reduce(w * x) = 8; the gradient of its square is 16 on each of two replicas, 32 reduced.
    assert [float(g) for g in strategy.run(step, args=(x,)).values] == [32.0, 96.0]


def test_reduction_to_one_device_equals_nccl_bit_by_bit_on_integers():
    def step():
        return context().all_reduce("SUM", (rid() + 1) * jnp.arange(5))

    for size in SIZES:
        first, second = (
            components(strategy, strategy.run(step))
            for strategy in (
                mirrored(size),
                mirrored(size, cross_device_ops=distrib.ReductionToOneDevice()),
            )
        )
        np.testing.assert_array_equal(first, second)


def test_reduction_to_one_device_adds_in_the_order_of_the_replicas():
    # In float32 1e8 + 1 is 1e8, so another order gives another sum.
    values = np.array([1e8, 1.0, -1e8, 1.0], np.float32)
    strategy = mirrored(4, cross_device_ops=distrib.ReductionToOneDevice())
    x = distrib.PerReplica(list(values))
    result = strategy.run(lambda v: context().all_reduce("SUM", v), args=(x,))
    assert [float(part) for part in result.values] == [1.0] * 4


def test_reduction_to_one_device_with_an_accumulation_function():
    def largest(values):
        return jnp.max(jnp.stack(values), 0)

    strategy = mirrored(3, cross_device_ops=distrib.ReductionToOneDevice(accumulation_fn=largest))
    result = strategy.run(lambda: context().all_reduce("SUM", rid() * 2))
    assert [int(part) for part in result.values] == [4, 4, 4]


@pytest.mark.parametrize(
    ("dtype", "mean_dtype"),
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("int32", "float32"),
        ("uint8", "float32"),
        ("complex64", "complex64"),
    ],
)
def test_dtypes(dtype, mean_dtype):
    def step():
        x = (rid() + 1).astype(dtype)
        return context().all_reduce("SUM", x), context().all_reduce("MEAN", x)

    total, mean = mirrored(2).run(step)
    assert (total.values[0].dtype, mean.values[0].dtype) == (dtype, mean_dtype)
    assert [complex(part) for part in total.values] == [3, 3]
    assert [complex(part) for part in mean.values] == [1.5, 1.5]


def test_a_tree_of_many_dtypes_and_shapes():
    def step():
        i = rid()
        tree = {"f": jnp.ones((2, 2)) * i, "i": [i, jnp.arange(3)], "h": i.astype(jnp.float16)}
        return context().all_reduce("SUM", tree, CommunicationOptions(bytes_per_pack=16))

    result = jax.tree.map(lambda x: x.values[1].tolist(), mirrored(3).run(step))
    assert result == {"f": [[3.0, 3.0], [3.0, 3.0]], "i": [3, [0, 3, 6]], "h": 3.0}


def test_an_empty_tree():
    assert mirrored(2).run(lambda: context().all_reduce("SUM", {"a": []})) == {"a": []}


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_booleans_are_refused(op):
    with pytest.raises(AggregationError, match=rf"all_reduce\({op}\).*dtype bool at \w*.*ok"):
        mirrored(2).run(lambda: context().all_reduce(op, {"ok": rid() == 0}))


def test_typed_keys_are_refused():
    with pytest.raises(AggregationError, match=r"dtype key<fry>"):
        mirrored(2).run(lambda: context().all_reduce("SUM", jax.random.key(0)))


def test_python_numbers_are_refused():
    with pytest.raises(TypeError, match=r"got 2.0 of type float at .*loss.*not an array"):
        mirrored(2).run(lambda: context().all_reduce("SUM", {"loss": 2.0}))


def test_unknown_op():
    with pytest.raises(ValueError, match="'PROD' is not a valid ReduceOp"):
        mirrored(2).run(lambda: context().all_reduce("PROD", rid()))


@pytest.mark.parametrize("size", SIZES)
def test_all_gather(size):
    strategy = mirrored(size)

    def step():
        x = rid() * jnp.ones((1, 2), jnp.int32)
        gather = context().all_gather
        return gather(x, 0), gather(x, 1), gather(x, -1)

    rows, columns, last = strategy.run(step)
    expected = np.repeat(np.arange(size), 2)
    for part in components(strategy, rows):
        np.testing.assert_array_equal(part, expected.reshape(size, 2))
    for part in [*components(strategy, columns), *components(strategy, last)]:
        np.testing.assert_array_equal(part, expected[None])


def test_all_gather_keeps_dtypes_and_structure():
    def step():
        return context().all_gather({"b": (rid() == 1)[None], "h": jnp.ones(1, jnp.bfloat16)}, 0)

    result = mirrored(2).run(step)
    assert result["b"].values[0].tolist() == [False, True]
    assert result["h"].values[0].dtype == jnp.bfloat16


def test_the_gradient_of_all_gather():
    strategy = mirrored(2)

    def step():
        # Each replica weighs the gathered pieces by 1 and 10, and itself by its id + 1.
        def loss(x):
            return (rid() + 1.0) * jnp.dot(context().all_gather(x[None], 0), jnp.array([1.0, 10.0]))

        return jax.grad(loss)(jnp.float32(1))

    assert [float(g) for g in strategy.run(step).values] == [3.0, 30.0]


@pytest.mark.parametrize("axis", [1, -2])
def test_all_gather_of_no_such_axis(axis):
    with pytest.raises(
        ValueError, match=rf"along axis {axis} .*shape \(2,\), which has no such axis"
    ):
        mirrored(2).run(lambda: context().all_gather(jnp.ones(2), axis))


def test_packing_makes_few_all_reduces():
    strategy = mirrored(2)

    def step(tree):
        return context().all_reduce("SUM", tree)

    tree = [jnp.ones(i + 1) for i in range(20)]
    text = strategy.extended.compiled_text(step, (tree,))
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
