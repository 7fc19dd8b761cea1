"""A batch is cut by tf.distribute's rule, and no example is lost or repeated."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.errors import InputError
from distrib.input import batch_size_of, piece_sizes, split_batch

# Measured with tf.distribute 2.x: range(n).batch(b) over 3 and 4 replicas, batch by batch.
MEASURED = [
    (7, 3, (3, 3, 1)),
    (4, 3, (2, 2, 0)),
    (2, 3, (1, 1, 0)),
    (5, 3, (2, 2, 1)),
    (6, 3, (2, 2, 2)),
    (3, 3, (1, 1, 1)),
    (7, 4, (2, 2, 2, 1)),
    (4, 4, (1, 1, 1, 1)),
    (2, 4, (1, 1, 0, 0)),
    (5, 4, (2, 2, 1, 0)),
    (6, 4, (2, 2, 2, 0)),
    (3, 4, (1, 1, 1, 0)),
    (1, 2, (1, 0)),
    (0, 2, (0, 0)),
]


@pytest.mark.parametrize(("examples", "replicas", "sizes"), MEASURED)
def test_sizes_are_those_of_tf_distribute(examples, replicas, sizes):
    assert piece_sizes(examples, replicas) == sizes


@given(examples=st.integers(0, 1000), replicas=st.integers(1, 64))
def test_sizes_fall_and_add_up(examples, replicas):
    sizes = piece_sizes(examples, replicas)
    assert len(sizes) == replicas
    assert sum(sizes) == examples
    assert list(sizes) == sorted(sizes, reverse=True)
    largest = -(-examples // replicas)
    # All are the largest or empty, but for one at most.
    assert sum(size not in (0, largest) for size in sizes) <= 1


@given(examples=st.integers(0, 100), replicas=st.integers(1, 16))
def test_pieces_are_views_that_join_to_the_batch(examples, replicas):
    batch = {"x": np.arange(examples * 3).reshape(examples, 3), "y": (np.arange(examples), None)}
    pieces = split_batch(batch, replicas)
    assert len(pieces) == replicas
    assert tuple(len(piece["x"]) for piece in pieces) == piece_sizes(examples, replicas)
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
    jax.tree.map(np.testing.assert_array_equal, joined, batch)
    for piece in pieces:
        assert piece["y"][1] is None
        for leaf, whole in ((piece["x"], batch["x"]), (piece["y"][0], batch["y"][0])):
            assert leaf.dtype == whole.dtype
            assert not leaf.size or np.shares_memory(leaf, whole)


def test_a_jax_array_is_split_as_one():
    pieces = split_batch(jnp.arange(3), 2)
    assert all(isinstance(piece, jax.Array) for piece in pieces)
    assert [piece.tolist() for piece in pieces] == [[0, 1], [2]]


def test_batch_size():
    assert batch_size_of((np.zeros((4, 2)), {"y": np.zeros(4)})) == 4


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((np.zeros(4), {"y": np.zeros(3)}), "[0] has 4, [1]['y'] has 3"),
        ({"x": np.zeros(4), "y": np.float32(1)}, "leaf y has rank 0"),
        (np.zeros(()), "leaf (root) has rank 0"),
        ({"x": np.zeros(4), "y": 1.5}, "leaf y is a float, 1.5"),
        (({}, None), "holds no arrays"),
    ],
)
def test_what_is_no_batch_is_refused_by_path(batch, message, replicas):
    with pytest.raises(InputError, match=re.escape(message)):
        split_batch(batch, replicas)


def test_a_message_names_a_few_of_many_leaves():
    batch = {f"x{i:02}": np.zeros(i + 1) for i in range(20)}
    with pytest.raises(InputError, match=r"x00 has 1, .*x07 has 8 \(12 more leaves\)"):
        batch_size_of(batch)


@pytest.mark.parametrize(("examples", "replicas"), [(-1, 2), (4, 0)])
def test_numbers_out_of_range(examples, replicas):
    with pytest.raises(InputError, match=f"{examples} examples .* {replicas} pieces"):
        piece_sizes(examples, replicas)
