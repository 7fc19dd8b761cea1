import jax.numpy as jnp
import pytest

from distrib.errors import VariableError
from distrib.variables import VariableAggregation, VariableSynchronization
from distrib.variables.synchronization import check_modes

AUTO, NONE = VariableSynchronization.AUTO, VariableAggregation.NONE
ON_READ, ON_WRITE = VariableSynchronization.ON_READ, VariableSynchronization.ON_WRITE


def test_auto_is_on_write():
    assert check_modes(AUTO, NONE, None, jnp.float32, "v") == (ON_WRITE, NONE, True)


@pytest.mark.parametrize(
    ("synchronization", "given", "trainable"),
    [
        (ON_READ, None, False),
        (ON_READ, True, True),
        (ON_WRITE, None, True),
        (ON_WRITE, False, False),
    ],
)
def test_trainable(synchronization, given, trainable):
    assert check_modes(synchronization, NONE, given, jnp.float32, "v")[2] is trainable


def test_unknown_modes():
    with pytest.raises(
        VariableError, match="synchronization mode: 'bad' for variable: v. Pass .*ON_READ"
    ):
        check_modes("bad", NONE, None, jnp.float32, "v")
    with pytest.raises(
        VariableError, match="aggregation mode: 1 for variable: v. Pass .*ONLY_FIRST_REPLICA"
    ):
        check_modes(AUTO, 1, None, jnp.float32, "v")


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.uint8])
def test_no_mean_of_integers(dtype):
    with pytest.raises(VariableError, match="aggregation=MEAN and the non-floating dtype"):
        check_modes(AUTO, VariableAggregation.MEAN, None, dtype, "v")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.complex64])
def test_mean_of_inexact_dtypes(dtype):
    mean = VariableAggregation.MEAN
    assert check_modes(AUTO, mean, None, dtype, "v")[1] is mean
