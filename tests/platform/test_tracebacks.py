"""Errors end with the user's line: the frames of distrib and JAX are taken out."""

import gc
import subprocess
import sys
import textwrap
import traceback
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import distrib
from distrib import config, errors
from distrib.platform.tracebacks import ends_with_users_line, filtered, is_hidden, user_location
from tests.support.strategies import mirrored

SUM = distrib.VariableAggregation.SUM


def code_lines(error):
    """Return the user's lines that a traceback shows; every frame must be of this file."""
    frames = traceback.extract_tb(error.__traceback__)
    assert {frame.filename for frame in frames} == {__file__}
    return [frame.line for frame in frames]


def failed(strategy, step, kind, *args):
    with pytest.raises(kind) as caught:
        strategy.run(step, args=args)
    return caught.value


def test_an_error_in_jax_code_of_the_step(engine):
    def step(x):
        return jax.grad(lambda y: jnp.dot(y, jnp.ones(3)))(x)  # the line

    error = failed(mirrored(2), step, TypeError, jnp.ones(4))
    assert code_lines(error)[-1].endswith("# the line")
    assert len(code_lines(error)) == 3


def test_an_error_in_a_jitted_function_within_the_step(engine):
    @jax.jit
    def inner(y):
        return y.reshape(3)  # inside

    def step(x):
        return inner(x)

    error = failed(mirrored(2), step, TypeError, jnp.ones(4))
    assert code_lines(error)[-2:] == ["return inner(x)", "return y.reshape(3)  # inside"]


class Model(nnx.Module):
    """A layer of four inputs."""

    def __init__(self):
        self.layer = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x)  # in the model


def test_an_error_beneath_a_model(engine):
    def step(model, x):
        return nnx.grad(lambda m: m(x).sum())(model)

    error = failed(mirrored(2), step, TypeError, Model(), jnp.ones((2, 3)))
    assert code_lines(error)[-1] == "return self.layer(x)  # in the model"


def test_an_error_of_the_users_own(engine):
    def step(x):
        raise KeyError("mine")

    error = failed(mirrored(2), step, KeyError, 1.0)
    assert code_lines(error) == ["strategy.run(step, args=args)", 'raise KeyError("mine")']


def test_an_error_of_a_variable(engine):
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(jnp.ones(3), aggregation=SUM)

    def step(x):
        v.assign(x)

    error = failed(strategy, step, errors.VariableError, jnp.ones(4))
    assert code_lines(error)[-1] == "v.assign(x)"


def test_an_error_of_a_collective(engine):
    def step(x):
        return distrib.get_replica_context().all_reduce("SUM", x > 0)

    error = failed(mirrored(2), step, errors.AggregationError, jnp.ones(4))
    assert code_lines(error)[-1] == 'return distrib.get_replica_context().all_reduce("SUM", x > 0)'


def test_a_value_that_is_not_known_yet_and_its_cause():
    def step(x):
        if x > 0:
            return x

    error = failed(mirrored(2), step, errors.TracedValueError, 1.0)
    assert code_lines(error)[-1] == "if x > 0:"
    assert isinstance(error.__cause__, jax.errors.TracerBoolConversionError)
    assert code_lines(error.__cause__) == ["if x > 0:"]


def test_a_value_that_escaped():
    kept = []

    def step(x):
        kept.append(x)
        return kept[0] + x  # from another trace

    strategy = mirrored(2)
    strategy.run(step, args=(jnp.ones(1),))
    error = failed(strategy, step, errors.TracedValueError, jnp.ones(2))
    assert len(code_lines(error)) >= 1


def test_replicas_that_do_not_meet_name_their_lines():
    def step(x):
        context = distrib.get_replica_context()
        if int(context.replica_id_in_sync_group) == 0:
            return context.all_reduce("SUM", x)
        return context.all_gather(x, axis=0)

    config.run_functions_eagerly(True)
    try:
        error = failed(mirrored(2), step, errors.MeetingError, jnp.ones(4))
        first = step.__code__.co_firstlineno + 3
        places = f"They are at test_tracebacks.py:{first} and test_tracebacks.py:{first + 1}."
        assert str(error).endswith(places)
        assert code_lines(error)[1:] == ['return context.all_reduce("SUM", x)']

        def returns(x):
            context = distrib.get_replica_context()
            return context.all_reduce("SUM", x) if int(context.replica_id_in_sync_group) else x

        error = failed(mirrored(2), returns, errors.MeetingError, jnp.ones(4))
        line = returns.__code__.co_firstlineno + 2
        assert str(error).endswith(f"Replica 1 is at test_tracebacks.py:{line}.")
    finally:
        config.run_functions_eagerly(False)


def test_a_collective_of_lax_that_runs_eagerly():
    def step(x):
        return jax.lax.psum(x, distrib.REPLICA_AXIS)

    config.run_functions_eagerly(True)
    try:
        error = failed(mirrored(2), step, errors.ContextError, jnp.ones(4))
    finally:
        config.run_functions_eagerly(False)
    assert code_lines(error)[-1] == "return jax.lax.psum(x, distrib.REPLICA_AXIS)"
    assert code_lines(error.__cause__)[-1] == "return jax.lax.psum(x, distrib.REPLICA_AXIS)"


def test_errors_outside_of_steps_end_with_the_call():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(jnp.ones(3), aggregation=SUM)
    state = distrib.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    calls = [
        lambda: strategy.run(len, args=3),
        lambda: strategy.reduce("SUM", 3.0, axis=None),
        lambda: strategy.gather(distrib.PerReplica([jnp.ones(2), jnp.ones(2)]), axis=2),
        lambda: v.assign(1.0),
        lambda: v.assign_add(jnp.ones(4)),
        lambda: v.assign_sub(jnp.ones(4)),
        lambda: state.apply_gradients(grads=3),
        lambda: state.replace(nothing=3),
    ]
    for call in calls:
        with pytest.raises(Exception) as caught:  # noqa: B017 - of many kinds
            call()
        frame = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert (frame.filename, frame.lineno) == (__file__, call.__code__.co_firstlineno)


def test_an_error_in_a_merge_function(engine):
    def merge(strategy, x):
        raise KeyError("mine")  # merging

    def step(x):
        return distrib.get_replica_context().merge_call(merge, args=(x,))

    assert code_lines(failed(mirrored(2), step, KeyError, 1.0))[1:] == [
        "return distrib.get_replica_context().merge_call(merge, args=(x,))",
        'raise KeyError("mine")  # merging',
    ]


def test_notes_survive(engine):
    def step(x):
        error = ValueError("mine")
        error.add_note("a note")
        raise error

    assert "a note" in failed(mirrored(2), step, ValueError, 1.0).__notes__


def test_all_frames_with_filtering_off(engine):
    def step(x):
        raise KeyError("mine")

    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error = failed(mirrored(2), step, KeyError, 1.0)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    assert any(is_hidden(name) for name in files)
    assert any(name.endswith("distrib/strategies/strategy.py") for name in files)


def test_an_error_that_is_handled_outside_keeps_its_frames():
    def step(x):
        raise KeyError("mine")

    try:
        jnp.ones(3).reshape(4)
    except TypeError as outer:
        whole = len(traceback.extract_tb(outer.__traceback__))
        error = failed(mirrored(2), step, KeyError, 1.0)
        assert error.__context__ is outer
        assert len(traceback.extract_tb(outer.__traceback__)) == whole


def test_an_error_keeps_no_array_of_distrib_alive(engine):
    class Marker:
        pass

    def step(x, marker):
        raise KeyError("mine")

    marker = Marker()
    held = weakref.ref(marker)
    strategy = mirrored(2)
    error = failed(strategy, step, KeyError, 1.0, marker)
    del marker, error
    gc.collect()
    assert held() is None


def test_the_decorator_keeps_name_and_result():
    @ends_with_users_line
    def verb(a, *, b):
        """Do it."""
        return a + b

    assert (verb(1, b=2), verb.__name__, verb.__doc__) == (3, "verb", "Do it.")
    assert filtered(None) is None
    assert user_location(None) is None


SCRIPT = """
    import sys
    import jax.numpy as jnp
    import distrib

    distrib.config.set_logical_devices("CPU", 2)
    distrib.config.run_functions_eagerly({eagerly})
    strategy = distrib.MirroredStrategy()
    with strategy.scope():
        v = distrib.Variable(jnp.ones(3), name="v")

    def shape(x):
        return jnp.dot(x, jnp.ones((3, 3)))

    def assign(x):
        v.assign(x)

    def value(x):
        return x if x.sum() > {limit} else jnp.dot(x, v.value())

    strategy.run({step}, args=(jnp.ones(4),))
"""


@pytest.mark.parametrize(
    ("step", "eagerly", "last_line"),
    [
        ("shape", False, "return jnp.dot(x, jnp.ones((3, 3)))"),
        ("assign", True, "v.assign(x)"),
        ("value", False, "return x if x.sum() > 9 else jnp.dot(x, v.value())"),
    ],
)
def test_what_a_script_prints(tmp_path, repo_root, step, eagerly, last_line):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(SCRIPT.format(step=step, eagerly=eagerly, limit=9)), encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": str(repo_root), "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    files = [line for line in lines if line.startswith("  File ")]
    assert files and all(str(script) in line for line in files)
    code = [lines[i + 1].strip() for i, line in enumerate(lines) if line.startswith("  File ")]
    assert code[-1] == last_line
