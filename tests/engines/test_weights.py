"""How much each replica counts where replicas have unequally many examples."""

import jax.numpy as jnp
import numpy as np
import pytest

from distrib.engines.weights import ExampleWeights

COUNTS = (3, 2, 0)


def weights(count, takes_part=True):
    return ExampleWeights(count, sum(COUNTS), len(COUNTS), takes_part)


def test_shares_add_up():
    assert [weights(count).share for count in COUNTS] == [0.6, 0.4, 0.0]


def test_a_mean_counts_each_example_once():
    values = [jnp.array([1.0, 10.0]), jnp.array([6.0, 0.0]), jnp.array([jnp.nan, jnp.nan])]
    parts = [
        weights(count).applied({"x": value}, mean=True)["x"]
        for count, value in zip(COUNTS, values, strict=True)
    ]
    np.testing.assert_allclose(sum(parts), [3.0, 6.0], rtol=1e-6)


def test_to_a_sum_a_replica_adds_what_it_has():
    value = jnp.array([2.0, jnp.nan])
    assert weights(3).applied(value, mean=False) is value
    # Without examples a share of a regularisation loss counts, the mean over nothing does not.
    assert weights(0).applied(value, mean=False).tolist() == [2.0, 0.0]


@pytest.mark.parametrize("mean", [True, False])
def test_a_replica_that_takes_no_part_adds_nothing(mean):
    assert weights(0, takes_part=False).applied(jnp.ones(2), mean=mean).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dtypes_are_kept(dtype):
    for count in COUNTS:
        for mean in (True, False):
            assert weights(count).applied(jnp.ones(2, dtype), mean=mean).dtype == dtype
