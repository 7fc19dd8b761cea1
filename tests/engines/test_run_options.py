"""The options of a call to ``run``."""

import jax.numpy as jnp
import numpy as np
import pytest

import distrib
from distrib.errors import UnevenReplicasError
from tests.support.strategies import central, mirrored


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps_per_call": 0}, "steps_per_call is 0, and must be an int of at least 1"),
        ({"steps_per_call": True}, "steps_per_call is True"),
        ({"steps_per_call": 2.0}, r"steps_per_call is 2\.0"),
        ({"explain": 1}, "explain is 1, and must be True or False"),
        ({"experimental_enable_dynamic_batch_size": None}, "must be True or False"),
        ({"experimental_bucketizing_dynamic_shape": True}, "compiled for each shape"),
        ({"experimental_xla_options": "fast"}, "must be a dict of XLA's options"),
        ({"experimental_xla_options": {"a": [1]}}, r"option 'a' with the value \[1\]: a name is"),
        ({"experimental_xla_options": {1: True}}, "option 1 with the value True"),
    ],
)
def test_bad_values_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        distrib.RunOptions(**fields)


def test_the_fields_of_tf_distribute_come_first_and_in_order():
    options = distrib.RunOptions(True, False, None)
    assert options == distrib.RunOptions()


@pytest.mark.parametrize("make", [lambda: mirrored(2), lambda: central(2)])
@pytest.mark.parametrize("eager", [False, True])
def test_unequal_shapes_can_be_forbidden(make, eager):
    strategy = make()
    options = distrib.RunOptions(experimental_enable_dynamic_batch_size=False)
    uneven, even = strategy.experimental_distribute_dataset([np.ones(3), np.ones(4)])
    distrib.config.run_functions_eagerly(eager)
    try:
        with pytest.raises(UnevenReplicasError, match=r"shapes, \[\(2,\), \(1,\)\], and"):
            strategy.run(jnp.sum, args=(uneven,), options=options)
        result = strategy.run(jnp.sum, args=(even,), options=options)
    finally:
        distrib.config.run_functions_eagerly(False)
    assert [float(x) for x in result.values] == [2, 2]


def test_options_reach_xla():
    strategy = mirrored(2)
    bad = distrib.RunOptions(experimental_xla_options={"no_such_option": 1})
    with pytest.raises(Exception, match="no_such_option"):
        strategy.run(lambda x: x + 1, args=(1.0,), options=bad)
    good = distrib.RunOptions(experimental_xla_options={"xla_cpu_enable_fast_min_max": True})
    traced = []

    def step(x):
        traced.append(1)
        return x + 1

    for options in (None, good, good, None):
        result = strategy.run(step, args=(1.0,), options=options)
        assert [float(x) for x in result.values] == [2, 2]
    assert traced == [1, 1]


@pytest.mark.parametrize("eager", [False, True])
def test_a_step_is_explained_before_it_runs(capsys, eager):
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(
            jnp.zeros(3), name="weights", aggregation=distrib.VariableAggregation.SUM
        )

    def step(x):
        v.assign_add(x)
        return x.sum()

    distrib.config.run_functions_eagerly(eager)
    try:
        options = distrib.RunOptions(explain=True)
        result = strategy.run(step, args=(jnp.ones(3),), options=options)
        options = distrib.RunOptions(explain=True, steps_per_call=2)
        strategy.run(step, args=(jnp.ones(3),), options=options)
    finally:
        distrib.config.run_functions_eagerly(False)
    assert [float(x) for x in result.values] == [3, 3]
    assert v.numpy().tolist() == [6, 6, 6]
    printed = capsys.readouterr().out
    assert printed.count("weights") >= 2
    assert printed.count("all-reduce") >= 2
    assert str(strategy.extended.explain(step, (jnp.ones(3),))) in printed
