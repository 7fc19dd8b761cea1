"""Every error of distrib is one of its own and the built-in that a user expects."""

import inspect

import pytest

from distrib import errors

BUILT_IN = {
    errors.DeviceError: ValueError,
    errors.VirtualDevicesError: RuntimeError,
    errors.ContextError: RuntimeError,
    errors.TracedValueError: TypeError,
    errors.NestedTraceError: RuntimeError,
    errors.OutputError: TypeError,
    errors.NotMirroredError: ValueError,
    errors.UnevenReplicasError: ValueError,
    errors.MeetingError: RuntimeError,
    errors.ReplicaDeadlineError: TimeoutError,
    errors.InputError: ValueError,
    errors.OutOfRangeError: IndexError,
    errors.PerReplicaError: ValueError,
    errors.VariableError: ValueError,
    errors.NonFiniteError: FloatingPointError,
    errors.AggregationError: ValueError,
    errors.SlicesError: ValueError,
    errors.UnsupportedError: NotImplementedError,
}


@pytest.mark.parametrize(("error", "built_in"), BUILT_IN.items(), ids=lambda e: e.__name__)
def test_caught_as_either(error, built_in):
    for expected in (error, built_in, errors.DistribError):
        with pytest.raises(expected, match="the text"):
            raise error("the text")
    assert str(error("the text")) == "the text"


def test_none_is_left_out():
    defined = {value for _, value in inspect.getmembers(errors, inspect.isclass)}
    assert defined == {*BUILT_IN, errors.DistribError}
    assert all(error.__doc__ for error in defined)


def test_the_base_is_nobodys_built_in():
    assert errors.DistribError.__mro__[1] is Exception
