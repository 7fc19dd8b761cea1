"""Which calls to ``run`` share a program, and how their arguments enter it."""

import enum
import gc
import weakref
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import distrib
from distrib.engines.signature import Kind, held_dtype, leaf_key, traced_form
from distrib.platform import replica_mesh, split
from distrib.values import Layout

shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
dtypes = st.sampled_from([np.float32, np.float64, np.int32, np.int64, np.bool_, np.float16])


def form_of(leaf):
    kind, key = leaf_key(leaf)
    form = traced_form(leaf, key)
    return kind, form.shape, form.dtype, form.weak_type


# Per-replica values.


@given(count=st.integers(1, 5), shape=shapes, dtype=dtypes)
def test_components_of_one_form_are_split(count, shape, dtype):
    value = distrib.PerReplica([np.zeros(shape, dtype) for _ in range(count)])
    kind, seen, seen_dtype, _ = form_of(value)
    assert kind is Kind.SPLIT
    assert seen == shape
    assert seen_dtype == jnp.asarray(np.zeros((), dtype)).dtype
    again = distrib.PerReplica([np.ones(shape, dtype) for _ in range(count)])
    assert leaf_key(again) == leaf_key(value)
    hash(leaf_key(value))


@given(forms=st.lists(st.tuples(shapes, dtypes), min_size=2, max_size=5))
def test_components_that_differ_are_uneven(forms):
    value = distrib.PerReplica([np.zeros(shape, dtype) for shape, dtype in forms])
    held = [(shape, jnp.asarray(np.zeros((), dtype)).dtype) for shape, dtype in forms]
    kind, key = leaf_key(value)
    alike = all(form == held[0] for form in held)
    assert kind is (Kind.SPLIT if alike else Kind.UNEVEN)
    if not alike:
        assert key == (Layout.COMPONENTS, tuple(held))
    assert leaf_key(value) == (kind, key)


@given(count=st.integers(1, 4), rows=st.integers(1, 3), width=st.integers(0, 3), dtype=dtypes)
def test_a_whole_is_split_as_it_lies(count, rows, width, dtype):
    mesh = replica_mesh(jax.devices("cpu")[:count])
    stacked = jax.device_put(np.zeros((count, rows, width), dtype), split(mesh))
    flat = jax.device_put(np.zeros((count * rows, width), dtype), split(mesh))
    for value in (distrib.PerReplica.stacked(stacked), distrib.PerReplica.concatenated(flat)):
        kind, shape, seen_dtype, _ = form_of(value)
        assert kind is Kind.SPLIT
        assert shape == value.values[0].shape == (rows, width)
        assert seen_dtype == value.values[0].dtype
    # A row with a replica axis and rows without one are different programs.
    assert leaf_key(distrib.PerReplica.stacked(flat)) != leaf_key(
        distrib.PerReplica.concatenated(flat)
    )


def test_numbers_for_each_replica():
    assert form_of(distrib.PerReplica([1, 2]))[:3] == (Kind.SPLIT, (), jnp.int32)
    assert leaf_key(distrib.PerReplica([1.5, 2]))[0] is Kind.UNEVEN


def test_objects_for_each_replica_are_refused():
    with pytest.raises(TypeError, match="components are not arrays or numbers"):
        leaf_key(distrib.PerReplica(["a", "b"]))


# What is the same on every replica.


@given(shape=shapes, dtype=dtypes)
def test_arrays_by_shape_and_dtype(shape, dtype):
    array = np.zeros(shape, dtype)
    kind, seen, seen_dtype, weak = form_of(array)
    assert (kind, seen, weak) == (Kind.EVERYWHERE, shape, False)
    assert seen_dtype == jnp.asarray(array).dtype
    # Where an array comes from makes no difference.
    assert leaf_key(array) == leaf_key(np.ones(shape, dtype)) == leaf_key(jnp.asarray(array))


@pytest.mark.parametrize(
    ("double", "held"),
    [
        (np.float64, "float32"),
        (np.int64, "int32"),
        (np.uint64, "uint32"),
        (np.complex128, "complex64"),
    ],
)
def test_doubles_are_what_jax_holds_of_them(double, held):
    assert held_dtype(np.dtype(double)) == held
    assert leaf_key(np.zeros(3, double)) == leaf_key(np.zeros(3, held))
    assert leaf_key(double(1)) == leaf_key(np.dtype(held).type(1))
    assert leaf_key(distrib.PerReplica([np.zeros(3, double)])) == leaf_key(
        distrib.PerReplica([np.zeros(3, held)])
    )


def test_numbers_by_type_and_not_by_value():
    assert leaf_key(1) == leaf_key(2)
    assert leaf_key(1.0) == leaf_key(2.5)
    assert len({leaf_key(1), leaf_key(1.0), leaf_key(1j), leaf_key(np.float32(1))}) == 4
    # A Python number takes the dtype of what it meets, a NumPy number has its own.
    assert form_of(3) == (Kind.EVERYWHERE, (), jnp.int32, True)
    assert form_of(3.0) == (Kind.EVERYWHERE, (), jnp.float32, True)
    assert form_of(np.float64(3)) == (Kind.EVERYWHERE, (), jnp.float32, False)


def test_a_weakly_typed_array_is_another_program():
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    assert leaf_key(weak) != leaf_key(jnp.float32(1))
    assert form_of(weak)[3]


def test_a_mirrored_value_is_as_an_array():
    assert leaf_key(distrib.Mirrored([jnp.zeros(2), jnp.zeros(2)])) == leaf_key(np.zeros(2))


def test_typed_keys():
    key = jax.random.key(0)
    kind, shape, dtype, _ = form_of(key)
    assert (kind, shape, dtype) == (Kind.EVERYWHERE, (), key.dtype)
    assert leaf_key(key) == leaf_key(jax.random.key(1))
    assert leaf_key(key) != leaf_key(jax.random.key(0, impl="rbg"))


@pytest.mark.parametrize("dtype", [object, "U3", "S3"])
def test_arrays_that_no_device_can_hold(dtype):
    with pytest.raises(TypeError, match="which no device can hold.*single strings"):
        leaf_key(np.array(["a"], dtype))


# Objects.


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


def test_constants_by_value():
    for value, other in ((True, False), ("a", "b"), (b"a", b"b"), (Mode.TRAIN, Mode.TEST)):
        assert leaf_key(value)[0] is Kind.OBJECT
        assert leaf_key(value) == leaf_key(value)
        assert leaf_key(value) != leaf_key(other)
    assert leaf_key(None)[0] is Kind.OBJECT
    assert leaf_key("".join(["te", "xt"])) == leaf_key("text")
    assert leaf_key(True) != leaf_key(1)


class Number(enum.IntEnum):
    ONE = 1


def test_constants_that_are_equal_and_not_the_same_are_different_programs():
    keys = [leaf_key(value) for value in (True, Number.ONE, Fraction(1))]
    assert len(set(keys)) == 3


class Config:
    """An object that is equal to every other of its class."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


def test_other_objects_by_identity():
    one, two = Config(), Config()
    assert leaf_key(one) == leaf_key(one)
    assert hash(leaf_key(one)) == hash(leaf_key(one))
    assert leaf_key(one) != leaf_key(two)


@pytest.mark.parametrize(
    "make",
    [
        Config,
        lambda: distrib.Variable(1.0),
        distrib.metrics.Mean,
        lambda: lambda x: x,
    ],
    ids=["object", "variable", "metric", "function"],
)
def test_a_key_does_not_keep_its_object_alive_and_then_equals_no_other(make):
    value = make()
    key = leaf_key(value)
    assert key == leaf_key(value)
    programs = {key: "program"}
    alive = weakref.ref(value)
    del value
    gc.collect()
    assert alive() is None
    # Even an object at the same address, whose key has the same hash.
    others = [make() for _ in range(50)]
    assert not any(leaf_key(other) in programs for other in others)


def test_what_is_neither_an_array_nor_hashable():
    class Unhashable:
        __hash__ = None

    with pytest.raises(TypeError, match="argument of type Unhashable, which is neither an array"):
        leaf_key(Unhashable())


def test_plain_values_without_weak_references():
    assert leaf_key(range(3)) == leaf_key(range(3))
    assert leaf_key(range(3)) != leaf_key(range(4))
    assert leaf_key(jnp.dtype("float32")) == leaf_key(jnp.dtype("float32"))


def test_a_dtype_is_held_as_jax_is_set_now():
    """What was found under 64-bit types used to be kept for after them."""
    with jax.enable_x64(True):
        assert held_dtype(np.dtype("float64")) == np.float64
    assert held_dtype(np.dtype("float64")) == np.float32
    with jax.enable_x64(True):
        assert held_dtype(np.dtype("float64")) == np.float64


def test_settings_of_jax_make_another_program():
    strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return x + 1

    for wide, dtype in ((False, "float32"), (True, "float64"), (False, "float32")):
        with jax.enable_x64(wide):
            result = strategy.run(step, args=(np.float64(1),))
            (batch,) = strategy.experimental_distribute_dataset([np.ones(2)])
        assert [x.dtype for x in result.values] == [dtype] * 2
        assert batch.values[0].dtype == dtype
