"""``gather``: concatenation over replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.sparse import BCOO

import distrib
from tests.conformance.table import (
    Raises,
    case,
    context,
    mirrored,
    outcome,
    per_replica,
    rid,
    values,
)

RANKS = Raises(ValueError, "they need one rank, and that axis")


@case(
    "gather-axis1",
    {"a1": [[1.0, 3.0, 4.0], [2.0, 5.0, 6.0]], "am1": [[1.0, 3.0, 4.0], [2.0, 5.0, 6.0]]},
    differs={
        "am1": "a limit of tf.distribute's default collective; its ReductionToOneDevice does it"
    },
)
def gather_axis1() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.array([[[1.0], [2.0]], [[3.0, 4.0], [5.0, 6.0]]][i]))
    return {"a1": strategy.gather(x, 1), "am1": outcome(lambda: strategy.gather(x, -1))}


@case("gather-scalar", RANKS)
def gather_scalar() -> Any:
    strategy = mirrored()
    return outcome(lambda: strategy.gather(values(strategy, jnp.int32), 0))


@case("gather-rank-mismatch", RANKS)
def gather_rank_mismatch() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.zeros([1] * (i + 1)))
    return outcome(lambda: strategy.gather(x, 0))


@case(
    "gather-nested",
    {"a": [1.0, 2.0], "b": [[1.0, 2.0]]},
    differs={
        "a": "a quirk of TensorFlow, whose documentation promises to gather",
        "b.0": "a quirk of TensorFlow, whose documentation promises to gather",
    },
)
def gather_nested() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.array([i + 1.0]))
    return strategy.gather({"a": x, "b": [x]}, 0)


@case(
    "gather-dtypes",
    {"boolean": [False, True]},
    differs={
        "boolean": "a limit of tf.distribute's default collective; its ReductionToOneDevice does it"
    },
    omits={"string": "strings"},
)
def gather_dtypes() -> Any:
    strategy = mirrored()
    return {"boolean": strategy.gather(values(strategy, lambda i: jnp.array([bool(i)])), 0)}


@case(
    "gather-reduction-to-one",
    {
        "neg": [1.0, 2.0, 2.0],
        "bools": [False, True],
        "rank": RANKS,
        "mism": Raises(ValueError, "differ in another axis too"),
        "all_gather_neg": per_replica([0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]),
    },
    omits={"strings": "strings"},
)
def gather_reduction_to_one() -> Any:
    strategy = mirrored(cross_device_ops=distrib.ReductionToOneDevice())

    def gathered(fn: Callable[[int], Any], axis: int) -> Any:
        return outcome(lambda: strategy.gather(values(strategy, fn), axis))

    return {
        "neg": gathered(lambda i: jnp.ones([i + 1]) * (i + 1), -1),
        "bools": gathered(lambda i: jnp.array([bool(i)]), 0),
        "rank": gathered(lambda i: jnp.zeros([1] * (i + 1)), 0),
        "mism": gathered(lambda i: jnp.ones([1, i + 1]), 0),
        "all_gather_neg": strategy.run(lambda: context().all_gather(jnp.ones([2]) * rid(), -1)),
    }


@case(
    "gather-sparse-error",
    {
        "sparse": Raises(TypeError, r"gather got a BCOO.*x\.todense\(\)"),
        "ragged": Raises(TypeError, r"gather got a IndexedSlices.*x\.to_dense\(\)"),
    },
)
def gather_sparse_error() -> Any:
    """JAX has no ragged arrays; slices are the other values that are not one array."""
    strategy = mirrored()
    sparse = values(strategy, lambda i: BCOO.fromdense(jnp.eye(2) * (i + 1)))
    slices = values(strategy, lambda i: distrib.IndexedSlices([1.0], [i], (2,)))
    return {
        "sparse": outcome(lambda: strategy.gather(sparse, 0)),
        "ragged": outcome(lambda: strategy.gather(slices, 0)),
    }
