import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import SlicesError, UnsupportedError, VariableError
from distrib.variables import owner_of
from tests.support.strategies import mirrored


def made(value, **kwargs):
    strategy = mirrored(2)
    with strategy.scope():
        return strategy, distrib.Variable(value, name="v", **kwargs)


def in_update(fn, value=(1.0, 2.0), **kwargs):
    """Return what ``fn`` returns for the second copy of a new variable."""
    strategy, v = made(value, **kwargs)
    seen = []
    strategy.extended.update(v, lambda copy: seen.append(fn(copy)))
    return seen[1]


def test_it_reads_as_an_array():
    facts = in_update(
        lambda c: (c.name, c.shape, c.ndim, c.size, c.dtype, c.device[-5:], repr(c)[:13])
    )
    assert facts == ("v", (2,), 1, 2, jnp.float32, "CPU:1", "<copy 1 of <d")
    values = in_update(lambda c: (c.numpy(), c + 1.0, jnp.sum(c), np.asarray(c), c.read_value()))
    np.testing.assert_array_equal(values[0], [1, 2])
    np.testing.assert_array_equal(values[1], [2, 3])
    assert float(values[2]) == 3
    assert values[1].devices() == values[4].devices() == {jax.devices("cpu")[1]}
    assert in_update(lambda c: jax.grad(lambda w: (w * w).sum())(c)).tolist() == [2, 4]


def test_it_reads_what_it_was_assigned():
    def change(copy):
        copy.assign([5.0, 6.0])
        copy.assign_add(copy)
        copy.assign_sub(jnp.ones(2))
        copy.scatter_max(distrib.IndexedSlices([100.0], [1]))
        return copy.value()

    assert in_update(change).tolist() == [9, 100]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: c.assign(1.0), VariableError, "'v': Shape mismatch"),
        (lambda c: c.scatter_add(distrib.IndexedSlices([1.0], [2])), SlicesError, "'v' of shape"),
        (lambda c: c.scatter_add(1.0), TypeError, "scatter_add of variable 'v' takes a"),
    ],
)
def test_what_does_not_fit(change, error, message):
    with pytest.raises(error, match=message):
        in_update(change)


def test_scatters_follow_the_rules_of_the_variable():
    rows = distrib.IndexedSlices([1.0], [0])
    with pytest.raises(UnsupportedError, match="ON_READ"):
        in_update(
            lambda c: c.scatter_add(rows), synchronization=distrib.VariableSynchronization.ON_READ
        )


def test_owners_do_not_keep_variables_alive():
    _, v = made([1.0])
    copies = v.values
    assert owner_of(copies[0]) is v
    assert owner_of(jnp.ones(1)) is None and owner_of(3) is None
    del v
    gc.collect()
    assert owner_of(copies[0]) is None
