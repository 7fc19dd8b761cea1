"""Groups of replicas that see the same shapes, and the step as each traces it."""

import jax
import jax.numpy as jnp
import pytest

from distrib.collectives import NcclAllReduce
from distrib.engines.groups import trace_group
from distrib.engines.lift import Call, lift
from distrib.engines.weights import ExampleWeights
from tests.support.strategies import mirrored

FIVE_OVER_FOUR = {count: ExampleWeights(count, 5, 4) for count in (2, 1, 0)}


def tracer(fn, traces=None):
    """Return what traces ``fn`` for given forms, as the engine does."""
    strategy = mirrored(4)

    def noted(*args):
        if traces is not None:
            traces.append([arg.shape for arg in args])
        return fn(*args)

    def trace(forms, weights=None, axis_size=None):
        call = Call(
            noted, lambda leaves, _: (tuple(leaves), {}), tuple(forms), (True,) * len(forms), None
        )
        return lift(
            strategy,
            call,
            num_replicas=4,
            ops=NcclAllReduce(),
            deferred=False,
            weights=weights,
            axis_size=axis_size,
        )

    return trace


def form(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("count", [2, 1, 0])
def test_a_group_is_traced_for_its_own_shapes(count):
    traces = []
    weights = FIVE_OVER_FOUR[count]
    group = trace_group(tracer(lambda x: (x * 2, x.sum(0)), traces), (form(count, 3),), weights)
    assert traces == [[(count, 3)]]
    assert group.forms == (form(count, 3),)
    assert (group.examples, group.weights, group.takes_part) == (count, weights, True)
    assert [group.output_shape(i) for i in range(2)] == [(count, 3), (3,)]


def flattened(x, scale):
    flat = x.reshape(x.shape[0], -1)
    return flat * scale, flat.sum(0), flat.T, flat.mean()


def test_a_step_that_cannot_be_traced_for_no_examples_takes_no_part():
    traces = []
    group = trace_group(tracer(flattened, traces), (form(0, 2, 3), form()), FIVE_OVER_FOUR[0])
    # For none it fails; for one and for two it is seen which axes count examples.
    assert traces == [[(0, 2, 3), ()], [(1, 2, 3), ()], [(2, 2, 3), ()]]
    assert not group.takes_part
    assert group.forms == (form(1, 2, 3), form())
    assert (group.examples, group.weights.takes_part) == (0, False)
    assert group.example_axes == ((0,), (), (1,), ())
    assert [group.output_shape(i) for i in range(4)] == [(0, 6), (6,), (6, 0), ()]


def test_with_examples_an_error_is_an_error():
    with pytest.raises(TypeError, match="cannot reshape"):
        trace_group(tracer(lambda x: x.reshape(7)), (form(2, 3),), FIVE_OVER_FOUR[2])


def test_without_an_empty_argument_an_error_is_an_error():
    with pytest.raises(TypeError, match="cannot reshape"):
        trace_group(tracer(lambda x: x.reshape(7)), (form(2, 3),), FIVE_OVER_FOUR[0])


def test_an_error_that_examples_do_not_cure_is_the_users():
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace_group(tracer(fails), (form(0, 3),), FIVE_OVER_FOUR[0])
