"""The train state under every strategy, and without one."""

import copy
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib import errors
from tests.support.strategies import (
    STRATEGIES,
    central,
    mirrored,
    on_every_strategy,
    on_two_replicas,
)


def params():
    return {"dense": {"kernel": jnp.ones((2, 1)), "bias": jnp.zeros(1)}}


def create(strategy, tx=None, **fields):
    with strategy.scope():
        return distrib.TrainState.create(
            apply_fn=lambda p, x: x @ p["dense"]["kernel"] + p["dense"]["bias"][None],
            params=fields.pop("params", params()),
            tx=tx or optax.sgd(0.1),
            **fields,
        )


def gradients(scale):
    return jax.tree.map(lambda p: jnp.full(p.shape, scale), params())


def flat(tree):
    return [float(x) for leaf in jax.tree.leaves(tree) for x in np.ravel(leaf)]


@on_every_strategy
def test_create(make_strategy):
    strategy = make_strategy()
    given = params()
    state = create(
        strategy,
        optax.adam(0.1),
        params=given,
        batch_stats={"mean": jnp.zeros(3)},
        ema={"decay": 0.5},
        keys={"dropout": jax.random.key(1)},
    )
    assert jax.tree.structure(state.params) == jax.tree.structure(given)
    assert flat(state.params) == [0.0, 1.0, 1.0]
    assert int(state.opt_state[0].count) == 0
    np.testing.assert_array_equal(state.batch_stats["mean"], [0, 0, 0])
    assert flat(state.ema) == [0.5]
    assert state.step.dtype == jnp.int32
    assert int(state.step) == 0
    assert list(state.keys) == ["dropout"]
    assert repr(state) == (
        "<distrib.TrainState with 3 parameters: params, opt_state, batch_stats, keys, ema>"
    )
    names = [v.name for v in state.distributed_variables()]
    assert names[:2] == ["params['dense']['bias']", "params['dense']['kernel']"]
    assert names[-1] == "step"
    trainable = [v.name for v in state.distributed_variables() if v.trainable]
    assert trainable == names[:2]
    assert all(v.distribute_strategy is strategy for v in state.distributed_variables())


def test_create_copies_what_it_is_given():
    given = {"w": np.ones(3, np.float32)}
    state = create(mirrored(2), params=given)
    given["w"][:] = 7
    np.testing.assert_array_equal(state.params["w"], [1, 1, 1])


def test_fields_that_were_not_given():
    state = create(mirrored(2))
    assert state.batch_stats is None
    assert state.keys is None
    with pytest.raises(
        AttributeError, match=r"no field 'ema'.*step, apply_fn, tx, params, opt_state"
    ):
        _ = state.ema


@pytest.mark.parametrize("name", ["step", "opt_state", "apply_gradients", "replace"])
def test_an_extra_field_may_not_have_a_taken_name(name):
    with pytest.raises(ValueError, match=f"has a field '{name}' already"):
        create(mirrored(2), **{name: jnp.zeros(())})


# apply_gradients.


@pytest.mark.parametrize("make_strategy", [mirrored, central])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Replica i has the gradient i + 1.
        ("MEAN", {1: 1.0, 2: 1.5, 4: 2.5}),
        ("SUM", {1: 1.0, 2: 3.0, 4: 10.0}),
    ],
)
def test_apply_gradients_combines(make_strategy, replicas, aggregation, expected):
    strategy = make_strategy(replicas)
    state = create(strategy, optax.sgd(1.0))

    def step():
        replica = distrib.get_replica_context().replica_id_in_sync_group
        returned = state.apply_gradients(grads=gradients(replica + 1.0), aggregation=aggregation)
        assert returned is state
        return state.params["dense"]["bias"]  # Inside of the step it is the new value already.

    inside = strategy.run(step)
    assert flat(state.params) == [-expected[replicas]] + [1 - expected[replicas]] * 2
    for part in strategy.experimental_local_results(inside):
        assert float(part[0]) == -expected[replicas]
    assert int(state.step) == 1
    strategy.extended.assert_mirrored(state)


@on_two_replicas
def test_gradients_that_have_been_combined_already(make_strategy):
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0))

    def step():
        context = distrib.get_replica_context()
        grads = gradients(context.replica_id_in_sync_group + 1.0)
        state.apply_gradients(grads=context.all_reduce("SUM", grads), aggregation=None)

    strategy.run(step)
    assert flat(state.params) == [-3.0, -2.0, -2.0]


@on_two_replicas
def test_mean_weights_replicas_by_their_examples(make_strategy):
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0))

    def step(x):
        state.apply_gradients(grads=gradients(x.mean()))

    # Three examples: 1 and 2 on the first replica, 6 on the second.
    data = np.array([1, 2, 6], np.float32)
    for batch in strategy.experimental_distribute_dataset(data, batch_size=3):
        strategy.run(step, args=(batch,))
    np.testing.assert_allclose(flat(state.params), [-3.0, -2.0, -2.0], rtol=1e-6)
    strategy.extended.assert_mirrored(state)


def test_an_unknown_aggregation():
    state = create(mirrored(2))
    with pytest.raises(
        ValueError, match="aggregation is 'AVERAGE', and must be 'MEAN', 'SUM' or None"
    ):
        state.apply_gradients(grads=gradients(1.0), aggregation="AVERAGE")


@on_two_replicas
def test_two_updates_in_one_step(make_strategy):
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0, momentum=0.5))

    def step():
        state.apply_gradients(grads=gradients(1.0))
        state.apply_gradients(grads=gradients(1.0))

    strategy.run(step)
    assert flat(state.params) == [-2.5, -1.5, -1.5]  # 1, then 1 + 0.5.
    assert int(state.step) == 2


@on_every_strategy
def test_outside_of_a_step_there_is_nothing_to_combine(make_strategy):
    strategy = make_strategy()
    state = create(strategy, optax.adam(0.5))
    for _ in range(2):
        state.apply_gradients(grads=gradients(1.0))
    with strategy.scope():
        state.apply_gradients(grads=gradients(1.0), aggregation="SUM")
    np.testing.assert_allclose(flat(state.params), [-1.5, -0.5, -0.5], rtol=1e-4)
    assert int(state.step) == 3
    strategy.extended.assert_mirrored(state)
    strategy.run(lambda: state.apply_gradients(grads=gradients(1.0)))
    assert int(state.step) == 4


def test_outside_of_every_strategy():
    state = distrib.TrainState.create(
        apply_fn=None, params={"w": 0.0}, tx=optax.sgd(0.1), keys=jax.random.key(0)
    )

    def step(x):
        grads = jax.grad(lambda p: ((p["w"] * x - 5) ** 2).mean())(state.params)
        state.apply_gradients(grads=grads)

    step(jnp.ones(4))
    assert float(state.params["w"]) == pytest.approx(1.0)
    distrib.get_strategy().run(step, args=(jnp.ones(4),))
    assert float(state.params["w"]) == pytest.approx(1.8)
    assert int(state.step) == 2
    state.replace(params={"w": 3.0}, step=7)
    assert (float(state.params["w"]), int(state.step)) == (3.0, 7)


def test_in_a_merge_function_gradients_are_combined_already():
    strategy = mirrored(2)
    state = create(strategy, optax.sgd(1.0))

    def merge(strategy, grads):
        state.apply_gradients(grads=strategy.reduce("SUM", grads, axis=None))

    def step():
        replica = distrib.get_replica_context().replica_id_in_sync_group
        distrib.get_replica_context().merge_call(merge, args=(gradients(replica + 1.0),))

    strategy.run(step)
    assert flat(state.params) == [-3.0, -2.0, -2.0]


# replace, and batch statistics.


@on_two_replicas
def test_batch_statistics_are_averaged(make_strategy):
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0), batch_stats={"mean": jnp.zeros(2), "count": 0})

    def step():
        replica = distrib.get_replica_context().replica_id_in_sync_group
        statistics = {"mean": jnp.full(2, 1.0 + 2 * replica), "count": 5 + replica}
        state.apply_gradients(grads=gradients(1.0), batch_stats=statistics)

    strategy.run(step)
    np.testing.assert_array_equal(state.batch_stats["mean"], [2, 2])
    assert int(state.batch_stats["count"]) == 5  # Of integers the first replica's.
    strategy.extended.assert_mirrored(state.batch_stats)
    assert int(state.step) == 1


@on_two_replicas
def test_replace_in_a_step(make_strategy):
    strategy = make_strategy()
    state = create(strategy, ema=jnp.zeros(()))

    def step():
        replica = distrib.get_replica_context().replica_id_in_sync_group
        return state.replace(ema=replica * 4.0, step=10)

    assert strategy.run(step) is state
    assert (float(state.ema), int(state.step)) == (2.0, 10)


@on_every_strategy
def test_replace_outside(make_strategy):
    strategy = make_strategy()
    state = create(strategy, ema=jnp.zeros(()))
    state.replace(params=gradients(9.0), ema=3.0, step=4)
    assert flat(state.params) == [9.0, 9.0, 9.0]
    assert (float(state.ema), int(state.step)) == (3.0, 4)
    strategy.extended.assert_mirrored(state)


@pytest.mark.parametrize("field", ["params", "step", "ema", "tx", "apply_fn"])
def test_a_field_cannot_be_set(field):
    """It would be lost, or ignored by the steps that are compiled already."""
    state = create(mirrored(2), ema=jnp.zeros(()))
    with pytest.raises(AttributeError, match=f"TrainState.{field} cannot be set.*state.replace"):
        setattr(state, field, None)


@pytest.mark.parametrize("field", ["loss", "keys", "tx", "apply_fn"])
def test_replace_cannot_change(field):
    state = create(mirrored(2), ema=jnp.zeros(()), keys={"dropout": jax.random.key(0)})
    with pytest.raises(
        AttributeError, match=f"cannot change '{field}' here; it can change step, params"
    ):
        state.replace(**{field: None})


# What does not fit.


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (
            {"dense": {"kernel": jnp.ones((2, 1))}},
            r"another structure: it has no params\['dense'\]\['bias'\]",
        ),
        (
            {"dense": {"kernel": jnp.ones((2, 1)), "bias": jnp.ones(1), "scale": jnp.ones(1)}},
            r"another structure: it has params\['dense'\]\['scale'\], where params has nothing",
        ),
        (
            {"dense": {"kernel": jnp.ones((1, 2)), "bias": jnp.ones(1)}},
            r"params\['dense'\]\['kernel'\] has shape \(2, 1\), .* of shape \(1, 2\)",
        ),
        (None, "another structure"),
    ],
    ids=["missing", "added", "shape", "None"],
)
def test_gradients_that_do_not_fit(grads, message, inside):
    strategy = mirrored(2)
    state = create(strategy)
    with pytest.raises(errors.VariableError, match=message):
        if inside:
            strategy.run(lambda: state.apply_gradients(grads=grads))
        else:
            state.apply_gradients(grads=grads)
    assert flat(state.params) == [0.0, 1.0, 1.0]
    assert int(state.step) == 0


def test_batch_statistics_that_do_not_fit():
    strategy = mirrored(2)
    state = create(strategy, batch_stats={"mean": jnp.zeros(2)})
    with pytest.raises(
        errors.VariableError,
        match=r"it has batch_stats\['variance'\], where batch_stats has nothing",
    ):
        strategy.run(
            lambda: state.apply_gradients(
                grads=gradients(1.0), batch_stats={"mean": jnp.zeros(2), "variance": jnp.zeros(2)}
            )
        )
    assert int(state.step) == 0


# Optimizers.

TRANSFORMATIONS = {
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "adaptive clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "schedule": lambda: optax.adam(optax.linear_schedule(0.1, 0.0, 5)),
    "accumulation": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(0.1)),
    "typed key noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1)
    ),
    "masked": lambda: optax.adamw(0.1, mask={"dense": {"kernel": True, "bias": False}}),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 2),
    "lookahead-free lion": lambda: optax.lion(0.1),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("name", ["Mirrored-2", "CentralStorage-2", "OneDevice"])
def test_optimizers_do_what_they_do_on_one_device(name, transformation):
    def loss(p, x):
        return ((x @ p["dense"]["kernel"] + p["dense"]["bias"][None]) ** 2).mean()

    data = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    tx = TRANSFORMATIONS[transformation]()
    expected, opt_state = params(), tx.init(params())
    for _ in range(4):
        updates, opt_state = tx.update(jax.grad(loss)(expected, data), opt_state, expected)
        expected = optax.apply_updates(expected, updates)

    strategy = STRATEGIES[name]()
    state = create(strategy, TRANSFORMATIONS[transformation]())

    def step(x):
        state.apply_gradients(grads=jax.grad(loss)(state.params, x))

    batches = strategy.experimental_distribute_dataset([data] * 4)
    for batch in batches:
        strategy.run(step, args=(batch,))
    np.testing.assert_allclose(flat(state.params), flat(expected), rtol=1e-5, atol=1e-6)
    strategy.extended.assert_mirrored(state)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(opt_state)


@on_two_replicas
def test_injected_hyperparameters_can_be_changed_between_steps(make_strategy):
    strategy = make_strategy()
    state = create(strategy, optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))

    def step():
        state.apply_gradients(grads=gradients(1.0))

    strategy.run(step)
    opt_state = state.opt_state
    opt_state.hyperparams["learning_rate"] = jnp.asarray(0.25)
    state.replace(opt_state=opt_state)
    strategy.run(step)
    assert flat(state.params) == [-1.25, -0.25, -0.25]


# Snapshots.


@on_every_strategy
def test_what_was_read_is_not_changed_by_training(make_strategy):
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0))
    before, opt_before, step_before = state.params, state.opt_state, state.step
    for _ in range(3):
        strategy.run(lambda: state.apply_gradients(grads=gradients(1.0)))
    assert flat(before) == [0.0, 1.0, 1.0]
    assert flat(opt_before) == []
    assert int(step_before) == 0
    assert flat(state.params) == [-3.0, -2.0, -2.0]


@on_two_replicas
def test_the_state_passes_through_a_step(make_strategy):
    strategy = make_strategy()
    state = create(strategy, optax.sgd(1.0))

    def step(state, scale):
        return state.apply_gradients(grads=gradients(scale))

    assert strategy.run(step, args=(state, 2.0)) is state
    assert flat(state.params) == [-2.0, -1.0, -1.0]
    other = create(strategy, optax.sgd(1.0))
    assert strategy.run(step, args=(other, 3.0)) is other
    assert flat(other.params) == [-3.0, -2.0, -2.0]
    assert flat(state.params) == [-2.0, -1.0, -1.0]


# Flax's serialization.


@pytest.mark.parametrize("before", ["Mirrored-2", "CentralStorage-2", "OneDevice"])
@pytest.mark.parametrize("after", ["Mirrored-4", "CentralStorage-1", "OneDevice"])
def test_saved_under_one_strategy_and_restored_under_another(before, after):
    tx = TRANSFORMATIONS["typed key noise"]
    fields = {"batch_stats": {"mean": jnp.arange(3.0)}, "keys": {"dropout": jax.random.key(3)}}
    saved_by = create(STRATEGIES[before](), tx(), **fields)
    for scale in (1.0, 2.0):
        saved_by.apply_gradients(grads=gradients(scale))
    saved = flax.serialization.to_bytes(saved_by)

    strategy = STRATEGIES[after]()
    fresh = {"batch_stats": {"mean": jnp.zeros(3)}, "keys": {"dropout": jax.random.key(0)}}
    state = create(strategy, tx(), **fresh)
    assert flax.serialization.from_bytes(state, saved) is state
    strategy.extended.assert_mirrored(state)
    assert int(state.step) == 2
    for mine, theirs in zip(
        state.distributed_variables(), saved_by.distributed_variables(), strict=True
    ):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy(), err_msg=mine.name)

    def next_step(state):
        return state.apply_gradients(grads=gradients(1.0))

    strategy.run(next_step, args=(state,))
    next_step(saved_by)
    np.testing.assert_array_equal(flat(state.params), flat(saved_by.params))


def test_restoring_a_state_of_another_structure_names_what_is_missing():
    saved = flax.serialization.to_bytes(create(mirrored(2)))
    state = create(mirrored(2), params={"other": jnp.zeros(3)})
    with pytest.raises(ValueError, match="other"):
        flax.serialization.from_bytes(state, saved)


def test_restoring_other_fields_or_shapes_changes_nothing():
    statistics = {"batch_stats": {"mean": jnp.ones(3)}}
    plain = flax.serialization.to_bytes(create(mirrored(2)))
    with_statistics = flax.serialization.to_bytes(
        create(mirrored(2), optax.adam(0.1), **statistics)
    )
    state = create(mirrored(2), optax.adam(0.1))
    with pytest.raises(ValueError, match="Missing: none; unknown: batch_stats. Create the state"):
        flax.serialization.from_bytes(state, with_statistics)
    with pytest.raises(ValueError, match="Missing: batch_stats; unknown: none"):
        flax.serialization.from_bytes(create(mirrored(2), **statistics), plain)
    state.apply_gradients(grads=gradients(1.0))
    before = flat(state.params)
    fields = flax.serialization.to_state_dict(create(mirrored(2), optax.adam(0.1)))
    fields["opt_state"] = jax.tree.map(lambda x: np.zeros((7, *np.shape(x))), fields["opt_state"])
    with pytest.raises(errors.VariableError, match="Shape mismatch"):
        flax.serialization.from_state_dict(state, fields)
    np.testing.assert_array_equal(flat(state.params), before)
    assert int(state.step) == 1


# Subclasses, as they are written with Flax.


class WithDefaults(distrib.TrainState):
    batch_stats: Any = None
    ema: Any = None
    label: str = "none"


def test_a_subclass_may_declare_fields_with_defaults():
    make = {"apply_fn": None, "params": {"w": 0.0}, "tx": optax.sgd(1.0)}
    state = WithDefaults.create(**make)
    assert (state.batch_stats, state.ema, state.label) == (None, None, "none")
    state = WithDefaults.create(**make, batch_stats={"m": jnp.zeros(2)}, ema=1.5, label="net")
    assert state.batch_stats["m"].shape == (2,)
    assert (float(state.ema), state.label) == (1.5, "net")


def test_a_deep_copy_is_another_state():
    strategy = mirrored(2)
    with strategy.scope():
        state = distrib.TrainState.create(
            apply_fn=None, params={"w": 1.0}, tx=optax.adam(0.1), keys={"k": jax.random.key(0)}
        )
    best = copy.deepcopy(state)
    strategy.run(lambda: state.apply_gradients(grads={"w": jnp.float32(1.0)}))
    assert (float(best.params["w"]), int(best.step)) == (1.0, 0)
    assert float(state.params["w"]) < 1.0
    strategy.extended.assert_mirrored(best)


def test_aggregation_is_named_as_elsewhere():
    strategy = mirrored(2)
    for aggregation in ("mean", "MEAN", distrib.ReduceOp.MEAN, distrib.VariableAggregation.MEAN):
        state = create(strategy)
        strategy.run(
            lambda s, a: s.apply_gradients(grads=gradients(1.0), aggregation=a),
            args=(state, aggregation),
        )
        assert int(state.step) == 1
