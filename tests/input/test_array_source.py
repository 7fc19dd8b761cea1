"""Arrays in memory: every example once an epoch, in an order that the seed decides."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.errors import InputError
from distrib.input import ArraySource, as_source

Example = collections.namedtuple("Example", ["x", "y"])


def _seen(source):
    return [batch.tolist() for batch in source]


@given(
    examples=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**70),
)
def test_each_example_once_an_epoch(examples, batch_size, shuffle, seed):
    x = np.arange(examples)
    source = ArraySource((x, x * 2.0), batch_size=batch_size, shuffle=shuffle, seed=seed)
    for _ in range(2):
        batches = list(source)
        assert [len(a) for a, _ in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert 0 < len(batches[-1][0]) <= batch_size
        seen = np.concatenate([a for a, _ in batches])
        assert sorted(seen) == list(x)
        np.testing.assert_array_equal(np.concatenate([b for _, b in batches]), seen * 2.0)
        if not shuffle:
            np.testing.assert_array_equal(seen, x)


def test_the_order_depends_on_seed_and_epoch_only():
    x = np.arange(32)

    def make(seed):
        return ArraySource(x, batch_size=8, shuffle=True, seed=seed)

    first, second = make(7), make(7)
    epochs = [_seen(first) for _ in range(3)]
    assert epochs == [_seen(second) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != _seen(make(8))


def test_an_epoch_is_counted_when_its_iterator_is_made():
    x = np.arange(32)
    source = ArraySource(x, batch_size=8, shuffle=True, seed=0)
    in_turn = [_seen(source), _seen(source)]
    source = ArraySource(x, batch_size=8, shuffle=True, seed=0)
    earlier, later = iter(source), iter(source)
    drawn_later_first = [_seen(later), _seen(earlier)]
    assert drawn_later_first == in_turn[::-1]


def test_without_a_seed_runs_differ_and_the_seed_can_be_read():
    x = np.arange(1000)
    source = ArraySource(x, batch_size=1000, shuffle=True)
    order = _seen(source)
    assert order != _seen(ArraySource(x, batch_size=1000, shuffle=True))
    assert order == _seen(ArraySource(x, batch_size=1000, shuffle=True, seed=source.seed))


def test_drop_remainder():
    assert _seen(ArraySource(np.arange(5), batch_size=2, drop_remainder=True)) == [[0, 1], [2, 3]]


def test_unshuffled_batches_are_views_and_shuffled_ones_fresh():
    x = np.arange(8)
    assert all(np.shares_memory(batch, x) for batch in ArraySource(x, batch_size=3))
    shuffled = list(ArraySource(x, batch_size=4, shuffle=True))
    assert not np.shares_memory(shuffled[0], x)
    assert not np.shares_memory(shuffled[0], shuffled[1])


@pytest.mark.parametrize("make", [np.ascontiguousarray, np.asfortranarray, lambda x: x[:, ::2]])
@pytest.mark.parametrize("width", [4, 4096])
def test_gathering_takes_whole_rows_from_any_layout(make, width):
    x = make(np.arange(64 * width, dtype=np.float32).reshape(64, width))
    source = ArraySource({"x": x, "row": np.arange(64)}, batch_size=16, shuffle=True, seed=1)
    for batch in source:
        np.testing.assert_array_equal(batch["x"], x[batch["row"]])
        assert batch["x"].dtype == np.float32


def test_large_batches_start_where_jax_takes_them_over_without_a_copy():
    x = np.zeros((64, 4096), np.float32)
    for batch in ArraySource(x, batch_size=16, shuffle=True):
        assert batch.ctypes.data % 64 == 0


@pytest.mark.parametrize(
    "arrays",
    [
        np.arange(4),
        (np.arange(4), np.zeros((4, 2))),
        {"x": np.arange(4), "y": np.arange(4)},
        Example(np.arange(4), np.arange(4)),
        (np.array(["a", "b", "c", "d"]), np.arange(4)),
    ],
)
def test_every_pytree_keeps_its_structure(arrays):
    source = as_source(arrays, batch_size=3)
    assert (source.kind, source.one_shot) == ("arrays", False)
    batches = list(source)
    assert [jax.tree.structure(batch) for batch in batches] == [jax.tree.structure(arrays)] * 2


def test_jax_arrays_and_memory_maps_become_numpy(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4))
    arrays = (jnp.arange(4), np.load(tmp_path / "x.npy", mmap_mode="r"))
    for batch in as_source(arrays, batch_size=2, shuffle=True):
        assert [type(leaf) for leaf in batch] == [np.ndarray, np.ndarray]


def test_describe():
    source = as_source(np.arange(4), batch_size=2, shuffle=True)
    assert source.describe() == "arrays of 4 examples in batches of 2, shuffled"


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((np.zeros(4), {"y": np.zeros(3)}), {}, "dataset differ in leading length: [0] has 4, [1]"),
        ({"x": np.zeros(4), "y": np.float32(1)}, {}, "dataset's leaf y has rank 0"),
        ({"x": np.zeros(4), "y": "text"}, {}, "leaf y is a str, 'text'"),
        (([1, 2], [3, 4]), {}, "leaf [0][0] is a int, 1"),
        ((), {}, "the dataset is (), which holds no arrays"),
        (np.zeros(4), {"batch_size": 0}, "batch_size is 0; it must be an int of at least 1"),
        (np.zeros(4), {"batch_size": 2.0}, "batch_size is 2.0; it must be an int"),
        (np.zeros(4), {"batch_size": True}, "batch_size is True; it must be an int"),
        (np.zeros(4), {"shuffle": 10_000}, "shuffle is 10000; it must be a bool"),
        (np.zeros(4), {"drop_remainder": 1}, "drop_remainder is 1; it must be a bool"),
        (np.zeros(4), {"shuffle": True, "seed": -1}, "seed is -1; it must be an int of at least 0"),
        (np.zeros(0), {}, "arrays of 0 examples in batches of 2 make no batch at all"),
        (
            np.zeros(4),
            {"batch_size": 8, "drop_remainder": True},
            "no batch at all: pass a smaller batch_size, or drop_remainder=False",
        ),
    ],
)
def test_refused(arrays, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        as_source(arrays, **{"batch_size": 2, **options})
