import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrib.collectives import CommunicationOptions, Packing, map_packed, plan_packs

_SIZES = st.lists(st.integers(0, 100), max_size=30)


@given(_SIZES, st.data(), st.integers(0, 150), st.none() | st.integers(0, 150))
def test_a_plan_keeps_its_promises(sizes, data, limit, tensor_limit):
    dtypes = data.draw(st.lists(st.sampled_from("abc"), min_size=len(sizes), max_size=len(sizes)))
    packs = plan_packs(sizes, dtypes, limit, tensor_limit)
    assert sorted(i for pack in packs for i in pack) == list(range(len(sizes)))
    for pack in packs:
        assert pack == sorted(pack)
        assert len({dtypes[i] for i in pack}) == 1
        if len(pack) > 1:
            assert sum(sizes[i] for i in pack) <= limit
            if tensor_limit is not None:
                assert all(sizes[i] <= tensor_limit for i in pack)


def test_small_tensors_of_one_dtype_share_a_pack():
    assert plan_packs([4] * 200, ["f"] * 200, limit=4096) == [list(range(200))]


def test_a_pack_that_is_full_is_followed_by_another():
    assert plan_packs([4, 4, 4, 4, 4], ["f"] * 5, limit=8) == [[0, 1], [2, 3], [4]]


def test_large_tensors_travel_alone():
    assert plan_packs([8, 100, 8, 8], ["f"] * 4, limit=1000, tensor_limit=8) == [[0, 2, 3], [1]]


def test_nothing_to_pack():
    assert plan_packs([], [], limit=4) == []
    assert map_packed(lambda x: x, [], Packing(limit=4)) == []


_DTYPES = ["float32", "int32", "float16", "complex64"]
_SHAPES = st.sampled_from([(), (3,), (0,), (2, 3)])


@settings(max_examples=20)
@given(
    st.lists(st.tuples(_SHAPES, st.sampled_from(_DTYPES)), max_size=6),
    st.integers(0, 100),
    st.none() | st.integers(0, 60),
    st.integers(1, 4),
)
def test_packing_keeps_values_order_and_dtypes(forms, limit, tensor_limit, pieces):
    leaves = [
        # No two elements are alike, so that none can be taken for another.
        jnp.arange(int(np.prod(shape))).reshape(shape).astype(dtype) + 31 * i
        for i, (shape, dtype) in enumerate(forms)
    ]
    results = map_packed(lambda x: x + x, leaves, Packing(limit, tensor_limit, pieces))
    assert len(results) == len(leaves)
    for leaf, result in zip(leaves, results, strict=True):
        assert (result.shape, result.dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(result, 2 * np.asarray(leaf))


def test_few_calls_for_many_leaves():
    seen = []

    def fn(x):
        seen.append(x.shape)
        return x

    leaves = [jnp.ones((2, 3)), jnp.ones(4), jnp.ones((), jnp.int32), jnp.ones((50, 50))]
    map_packed(fn, leaves, Packing(limit=100))
    assert sorted(seen) == [(), (10,), (50, 50)]


def test_options():
    assert CommunicationOptions(bytes_per_pack=64).pack_limit == 64
    assert CommunicationOptions(bytes_per_pack=64).tensor_limit == 64
    assert CommunicationOptions().pack_limit == 4 * 1024 * 1024
    assert CommunicationOptions().tensor_limit == 64 * 1024
    with pytest.raises(ValueError, match="bytes_per_pack is -1"):
        CommunicationOptions(bytes_per_pack=-1)
