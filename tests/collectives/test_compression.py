"""What travels in fewer bits, what arrives, and what is rounded off on the way."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distrib
from distrib.collectives import compression_named
from distrib.experimental import CommunicationOptions
from tests.support.algorithms import every_algorithm, mirrored, per_replica, summed

every_compression = pytest.mark.parametrize("compression", ["bfloat16", "int8"])
COLLECTIVE = re.compile(
    r" = (.*?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def wire_dtypes(text):
    """Return the dtypes of all that collectives send, from the compiled text."""
    results = COLLECTIVE.findall(text)
    return sorted({dtype for result in results for dtype in re.findall(r"(\w+)\[", result)})


@settings(max_examples=30)
@given(
    st.sampled_from(["bfloat16", "int8"]),
    st.sampled_from([1, 255, 256, 600]),
    st.integers(-30, 30),
    st.integers(0, 99),
)
def test_what_arrives_is_what_was_sent_but_for_a_bounded_error(name, length, exponent, seed):
    compression = compression_named(name)
    x = np.random.default_rng(seed).normal(size=(2, length)).astype(np.float32) * 2.0**exponent
    arrived = np.asarray(compression.decode(compression.encode(jnp.asarray(x)), jnp.asarray(x)))
    if name == "bfloat16":
        assert np.all(np.abs(arrived - x) <= np.abs(x) * 2.0**-8)
    else:
        # Half a step of the scale, which is that of the element's block of 256.
        padded = np.pad(x, [(0, 0), (0, -length % 256)]).reshape(2, -1, 256)
        bound = np.repeat(np.abs(padded).max(-1) / 127 / 2, 256, axis=-1)[:, :length]
        assert np.all(np.abs(arrived - x) <= bound * 1.0001)


@every_compression
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_still_seen(compression, number):
    codec = compression_named(compression)
    x = jnp.array([1.0, number, 3.0])
    assert not np.isfinite(codec.decode(codec.encode(x), x)).all()


def test_zeros_and_tiny_numbers_arrive_in_int8():
    codec = compression_named("int8")
    for x in (jnp.zeros(3), jnp.full(3, 1e-40), jnp.array([0.0, -2.0, 127.0])):
        np.testing.assert_allclose(codec.decode(codec.encode(x), x), x, atol=1e-38)


def test_a_small_number_beside_a_large_one_in_another_block_keeps_its_digits():
    codec = compression_named("int8")
    x = jnp.concatenate([jnp.full(256, 1e6), jnp.full(256, 1e-6)])
    np.testing.assert_allclose(codec.decode(codec.encode(x), x), x, rtol=1e-6)


@every_algorithm
@every_compression
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_wire_carries_nothing_wider(make, compression, count):
    strategy = mirrored(count, make(compression=compression))
    values = per_replica(strategy, [np.ones(600, np.float32)] * count)
    text = strategy.extended.compiled_text(summed, args=(values,))
    assert wire_dtypes(text) == [{"bfloat16": "u16", "int8": "s8"}[compression]]


@every_algorithm
def test_what_is_not_floating_is_not_compressed(make):
    strategy = mirrored(3, make(compression="int8"))
    numbers = [jnp.int32(2**24 + 1), jnp.complex64(1 + 2j), jnp.uint8(3)]
    sums = strategy.run(lambda: summed(numbers))
    assert [complex(x.values[2]) for x in sums] == [3 * (2**24 + 1), 3 + 6j, 9]
    narrow = mirrored(3, make(compression="bfloat16"))
    text = narrow.extended.compiled_text(lambda: summed(jnp.ones(4, jnp.float16)))
    assert "u16" not in wire_dtypes(text)


@every_algorithm
@every_compression
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_sum_is_right_to_the_precision_of_the_wire(make, compression, count):
    strategy = mirrored(count, make(compression=compression))
    values = np.random.default_rng(count).normal(size=(count, 7, 50)).astype(np.float32)
    result = strategy.run(summed, args=(per_replica(strategy, list(values)),))
    parts = [np.asarray(part) for part in strategy.experimental_local_results(result)]
    assert len({part.tobytes() for part in parts}) == 1
    # On its way to the sum a value is rounded at most once for each replica, by half a unit of
    # the largest partial sum.
    unit = {"bfloat16": 2.0**-8, "int8": 1 / 127}[compression]
    largest = np.abs(values).sum(0).max()
    bound = count * unit / 2 * largest if count > 1 else 0
    assert np.abs(parts[0] - values.sum(0)).max() <= bound


@every_algorithm
@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_are_the_sum_and_what_was_rounded_off(make, count, dtype):
    ops = make(compression="int8")
    with jax.enable_x64(dtype == "float64"):
        strategy = mirrored(count, ops)
        values = np.random.default_rng(0).normal(size=(count, 300)).astype(dtype)

        def step(x):
            return ops.sum_with_errors(x, count)

        totals, errors = strategy.run(step, args=(per_replica(strategy, list(values)),))
        assert errors.values[0].dtype == totals.values[0].dtype == dtype
        kept = np.sum([np.asarray(e) for e in errors.values], axis=0)
        np.testing.assert_allclose(totals.values[0] + kept, values.sum(0), rtol=1e-5, atol=1e-5)
        assert np.abs(kept).max() > 1e-4


@every_algorithm
def test_gradients_go_through_the_compressed_sum(make):
    strategy = mirrored(2, make(compression="bfloat16"))

    def step(x):
        return jax.grad(lambda w: summed(w * x) ** 2)(jnp.float32(2))

    gradients = strategy.run(step, args=(per_replica(strategy, np.float32([1, 3])),)).values
    assert [float(g) for g in gradients] == [32, 96]


@every_algorithm
@every_compression
def test_both_engines_give_the_same_bits(make, compression):
    values = np.random.default_rng(1).normal(size=(3, 20)).astype(np.float32)
    results = []
    for eager in (False, True):
        distrib.config.run_functions_eagerly(eager)
        strategy = mirrored(3, make(compression=compression))
        result = strategy.run(summed, args=(per_replica(strategy, list(values)),))
        results += [np.asarray(part).tobytes() for part in result.values]
    distrib.config.run_functions_eagerly(False)
    assert len(set(results)) == 1


@every_algorithm
def test_uneven_batches(make):
    strategy = mirrored(4, make(compression="bfloat16"))
    (batch,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 3, 10, 20])])
    total = strategy.run(lambda x: summed(x.sum()), args=(batch,))
    assert [float(x) for x in total.values] == [36] * 4


def test_an_option_of_one_call():
    strategy = mirrored(2, distrib.RingAllReduce())
    options = CommunicationOptions(compression="bfloat16")

    def step(x):
        return distrib.get_replica_context().all_reduce("SUM", x, options)

    args = (jnp.ones(8),)
    assert wire_dtypes(strategy.extended.compiled_text(step, args=args)) == ["u16"]
    assert wire_dtypes(strategy.extended.compiled_text(summed, args=args)) == ["f32"]
    value = per_replica(strategy, np.float32([1 / 3, 0]))
    third = strategy.extended.reduce_to("SUM", value, "CPU:0", options)
    assert float(third) == float(jnp.bfloat16(1 / 3))
    central = distrib.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    assert wire_dtypes(central.extended.compiled_text(step, args=args)) == ["u16"]


class Plain(distrib.CrossDeviceOps):
    """An algorithm that knows of no compression."""

    def sum_over_replicas(self, value, num_replicas):
        return jax.lax.psum(value, distrib.REPLICA_AXIS)


def test_what_is_refused():
    with pytest.raises(ValueError, match="compression is 'int4', and must be 'bfloat16', 'int8'"):
        distrib.RingAllReduce(compression="int4")
    with pytest.raises(ValueError, match="compression is 'zip'"):
        CommunicationOptions(compression="zip")
    options = CommunicationOptions(compression="int8")
    strategy = mirrored(2, Plain())
    with pytest.raises(ValueError, match="Plain cannot compress"):
        strategy.run(lambda: distrib.get_replica_context().all_reduce("SUM", jnp.ones(2), options))
    with pytest.raises(ValueError, match="all_gather got compression='int8'"):
        strategy.run(lambda: distrib.get_replica_context().all_gather(jnp.ones(2), 0, options))
