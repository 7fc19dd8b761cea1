"""What a replica brings to a combination, by its examples."""

import jax.numpy as jnp
import numpy as np

import distrib
from distrib.engines.contribution import Contribution
from distrib.engines.weights import ExampleWeights
from distrib.reduce_op import ReduceOp

EQUAL = Contribution(4, None, None)
THREE_OF_TEN = Contribution(4, ExampleWeights(3, 10, 4), None)


def test_examples_and_shares():
    assert (EQUAL.global_examples(3), EQUAL.share_of_mean) == (12, 0.25)
    assert (THREE_OF_TEN.global_examples(3), THREE_OF_TEN.share_of_mean) == (10, 0.3)


def test_a_mean_is_a_sum_of_shares_where_examples_differ():
    op, value = EQUAL.weighted(ReduceOp.MEAN, jnp.float32(2))
    assert (op, float(value)) == (ReduceOp.MEAN, 2)
    op, value = THREE_OF_TEN.weighted(ReduceOp.MEAN, jnp.float32(2))
    assert op is ReduceOp.SUM
    np.testing.assert_allclose(value, 0.6)
    op, value = THREE_OF_TEN.weighted(ReduceOp.SUM, jnp.float32(2))
    assert (op, float(value)) == (ReduceOp.SUM, 2)


def test_what_is_accumulated():
    v = distrib.Variable(1.0)
    for contribution, aggregation, expected in (
        (EQUAL, "SUM", 3),
        (EQUAL, "MEAN", 1.5),
        (EQUAL, None, 1.5),
        (THREE_OF_TEN, "MEAN", 1.6),
    ):
        (new,) = contribution.accumulated([v], lambda v: v.value(), [jnp.float32(2)], aggregation)
        np.testing.assert_allclose(new, expected)
