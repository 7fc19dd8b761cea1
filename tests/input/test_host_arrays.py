"""What counts as an array in a batch, and how it becomes NumPy's."""

import jax.numpy as jnp
import numpy as np
import pytest

from distrib.errors import InputError
from distrib.input.host_arrays import comes_from, host_batch, is_array


class Foreign:
    """An array of some other library."""

    shape, dtype = (2,), np.dtype(np.int64)

    def __array__(self, dtype=None, copy=None):
        return np.array([4, 5], dtype)


class Broken(Foreign):
    """One that NumPy cannot take."""

    dtype = "bfloat16"

    def __array__(self, dtype=None, copy=None):
        raise TypeError("no such type")


class Detached(Foreign):
    """A tensor on another device, under autograd, as torch has them."""

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return np.array([6, 7])


Detached.__module__ = "torch.nn.parameter"


def test_where_a_class_comes_from():
    class Subclass(Detached):
        """A user's own."""

    assert comes_from(Detached(), "torch")
    assert comes_from(Subclass(), "torch")
    assert comes_from(Subclass(), "torch", "Detached")
    assert not comes_from(Subclass(), "torch", "Foreign")
    assert not comes_from(Detached(), "torch.nn")
    assert not comes_from(3, "torch")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.zeros(2), True),
        (np.float32(1), True),
        (jnp.zeros(2), True),
        (Foreign(), True),
        (Detached(), True),
        (1.5, False),
        ([1, 2], False),
        ("text", False),
        (None, False),
    ],
)
def test_is_array(value, expected):
    assert is_array(value) is expected


def test_a_batch_of_arrays_is_returned_as_it_is():
    batch = {"x": np.arange(2), "y": [jnp.zeros(2), None]}
    assert host_batch(batch) is batch


def test_other_arrays_are_converted_in_place():
    on_device = jnp.zeros(2)
    converted = host_batch((Foreign(), {"t": Detached(), "s": np.int8(3)}, on_device))
    assert converted[0].tolist() == [4, 5]
    assert converted[1]["t"].tolist() == [6, 7]
    assert (converted[1]["s"].shape, converted[1]["s"].dtype) == ((), np.int8)
    assert converted[2] is on_device


def test_what_is_no_array_is_named_by_path_and_type():
    message = r"leaf a\[1\] is a str, 'text'; every leaf of a batch must be an array \[examples"
    with pytest.raises(InputError, match=message):
        host_batch({"a": [np.arange(2), "text"]})


def test_what_does_not_convert_is_named_with_its_dtype_and_the_way_out():
    message = r"leaf x, a Broken of bfloat16, .* \(no such type\): convert it in the loader"
    with pytest.raises(InputError, match=message) as caught:
        host_batch({"x": Broken()})
    assert isinstance(caught.value.__cause__, TypeError)
