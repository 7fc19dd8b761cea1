"""Whatever both engines run, they give the same outputs, variables and train states."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from tests.support.strategies import central, mirrored

Aggregation = distrib.VariableAggregation
ON_READ = distrib.VariableSynchronization.ON_READ
ON_WRITE = distrib.VariableSynchronization.ON_WRITE

STRATEGIES = {
    "Mirrored-1": lambda: mirrored(1),
    "Mirrored-2": lambda: mirrored(2),
    "Mirrored-3": lambda: mirrored(3),
    "CentralStorage-2": lambda: central(2),
    "OneDevice": lambda: distrib.OneDeviceStrategy("CPU:1"),
}
on_each = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES)

DATA = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def compiled_afterwards():
    yield
    distrib.config.run_functions_eagerly(False)


def context():
    return distrib.get_replica_context()


def rid():
    return jnp.asarray(context().replica_id_in_sync_group, jnp.float32)


def flat(strategy, tree):
    """Return the components of everything in a tree, as NumPy arrays; errors as their kind."""
    if isinstance(tree, Exception):
        kind = type(tree)
        return [f"{kind.__module__}.{kind.__name__}"]
    leaves = jax.tree.leaves(
        tree, is_leaf=lambda x: isinstance(x, distrib.Variable | distrib.DistributedValues)
    )
    parts = [part for leaf in leaves for part in strategy.experimental_local_results(leaf)]
    keys = [hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in parts]
    return [jax.random.key_data(x) if k else x for x, k in zip(parts, keys, strict=True)]


def assert_agree(make, program):
    """Run ``program(strategy)`` under both engines, and compare what it returns."""
    results = []
    for eager in (True, False):
        distrib.config.run_functions_eagerly(eager)
        strategy = make()
        results.append(flat(strategy, program(strategy)))
    eager, compiled = results
    assert len(eager) == len(compiled) > 0
    for one, other in zip(eager, compiled, strict=True):
        if isinstance(other, str):
            assert one == other
            continue
        one, other = np.asarray(one), np.asarray(other)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def attempt(fn):
    """Return what ``fn`` returns, or the error that it raises."""
    try:
        return fn()
    except Exception as error:
        return error


def of_replicas(strategy, fn):
    return strategy.experimental_distribute_values_from_function(
        lambda c: fn(c.replica_id_in_sync_group)
    )


@on_each
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_a_replica_without_examples_adds_zero_to_what_is_combined(make, op):
    def program(strategy):
        with strategy.scope():
            v = distrib.Variable(1.0, aggregation=Aggregation[op])
        (batch,) = strategy.experimental_distribute_dataset(np.ones((1, 2), "f"), batch_size=1)

        def step(x):
            scale = jnp.mean(x)  # NaN where there are no examples

            def loss(w):
                return context().all_reduce(op, w * scale) ** 2

            v.assign_add(scale)
            return jax.value_and_grad(loss)(1.0), context().all_reduce(op, {"a": [scale]})

        result = strategy.run(step, args=(batch,))
        share = 1.0 if op == "SUM" else 1 / strategy.num_replicas_in_sync
        np.testing.assert_allclose(np.stack(flat(strategy, result[1])), share, rtol=1e-6)
        np.testing.assert_allclose(v.numpy(), 1.0 + share, rtol=1e-6)
        return result, v

    assert_agree(make, program)


CHANGES = ("assign", "assign_add", "assign_sub")


@on_each
@pytest.mark.parametrize("synchronization", [ON_READ, ON_WRITE], ids=["on_read", "on_write"])
@pytest.mark.parametrize("aggregation", Aggregation, ids=lambda a: a.name)
def test_variables(make, synchronization, aggregation):
    def program(strategy):
        found = []
        for change, value in itertools.product(CHANGES, (lambda: rid() + 1, lambda: 2.0)):
            with strategy.scope():
                v = distrib.Variable(5.0, synchronization=synchronization, aggregation=aggregation)

            def step(v=v, change=change, value=value):
                returned = getattr(v, change)(value())
                return returned, v.value(), v * 2.0

            for _ in range(2):
                result = attempt(lambda step=step: strategy.run(step))
                found += flat(strategy, result)
                found += flat(strategy, v.values)
            found += flat(strategy, attempt(v.read_value))
        return [x for x in found if not isinstance(x, str)], [
            hash_of(x) for x in found if isinstance(x, str)
        ]

    assert_agree(make, program)


def hash_of(text):
    return sum(ord(c) * (i + 1) for i, c in enumerate(text))


@on_each
@pytest.mark.parametrize("aggregation", Aggregation, ids=lambda a: a.name)
def test_an_argument_that_is_a_number_is_assigned(make, aggregation):
    def program(strategy):
        with strategy.scope():
            v = distrib.Variable(5.0, aggregation=aggregation)
        result = attempt(lambda: strategy.run(lambda x: v.assign_add(x), args=(2.0,)))
        return result if isinstance(result, Exception) else (result, v)

    assert_agree(make, program)


@on_each
@pytest.mark.parametrize("aggregation", Aggregation, ids=lambda a: a.name)
def test_integers(make, aggregation):
    def program(strategy):
        with strategy.scope():
            v = attempt(lambda: distrib.Variable(7, aggregation=aggregation))
        if isinstance(v, Exception):
            return v
        result = attempt(
            lambda: strategy.run(lambda: v.assign_add(context().replica_id_in_sync_group + 1))
        )
        return result if isinstance(result, Exception) else (result, v)

    assert_agree(make, program)


@on_each
def test_changes_in_a_merge_call(make):
    def program(strategy):
        with strategy.scope():
            v = distrib.Variable(1.0)
            own = distrib.Variable(
                6.0, synchronization=ON_READ, aggregation=Aggregation.SUM, name="own"
            )

        def merge(current, x, y):
            v.assign_add(current.reduce("SUM", x, axis=None))
            before = own.value()
            own.assign(before + 6.0)
            mean = current.reduce("MEAN", {"y": y}, axis=0)
            return v.value(), before, mean, current.gather(y, axis=0), x

        def step(x):
            own.assign_add(rid())
            merged = context().merge_call(merge, args=(x,), kwargs={"y": jnp.stack([x, 2 * x])})
            return merged, v + own

        x = of_replicas(strategy, lambda i: jnp.float32(i + 1))
        return strategy.run(step, args=(x,)), v, own.values

    assert_agree(make, program)


@on_each
def test_updates_of_the_extended_interface(make):
    def program(strategy):
        with strategy.scope():
            v = distrib.Variable(1.0, aggregation=Aggregation.MEAN)

        def merge(current, x):
            total = current.extended.reduce_to("SUM", x, v)
            return current.extended.update(v, lambda w, y: w.assign_add(y), args=(total,))

        def step():
            context().merge_call(merge, args=(rid() + 1,))
            return v.value()

        return strategy.run(step), v

    assert_agree(make, program)


@on_each
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_all_reduce(make, op):
    def program(strategy):
        def step():
            i = context().replica_id_in_sync_group
            tree = {
                "a": jnp.arange(6.0).reshape(2, 3) + rid(),
                "b": (i, jnp.zeros(0), [jnp.float32(3), jnp.bfloat16(1) * i]),
                "none": None,
            }
            reduced = context().all_reduce(op, tree)
            return reduced, context().all_reduce(op, ())

        return strategy.run(step)

    assert_agree(make, program)


@on_each
def test_all_gather(make):
    def program(strategy):
        def step():
            x = jnp.arange(6.0).reshape(2, 3) + rid()
            gather = context().all_gather
            flags = jnp.stack([rid() > 0, rid() > 1])
            return gather({"a": x, "b": [flags]}, 0), gather(x, -1), gather(x, 1)

        return strategy.run(step)

    assert_agree(make, program)


@on_each
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_gradients_through_collectives(make, op):
    def program(strategy):
        def step(x):
            def loss(w):
                total = context().all_reduce(op, {"y": w * x.sum(0), "n": w[0]})
                parts = context().all_gather(w * x, 0)
                return (total["y"] ** 2).sum() * total["n"] * (rid() + 1) + (parts**3).sum()

            return jax.value_and_grad(loss)(jnp.array([0.5, 1.0, 2.0]))

        x = of_replicas(strategy, lambda i: jnp.asarray(DATA[2 * i : 2 * i + 2]))
        return strategy.run(step, args=(x,))

    with jax.numpy_rank_promotion("allow"):
        assert_agree(make, program)


@on_each
def test_what_is_refused(make):
    def program(strategy):
        calls = [
            lambda: context().all_reduce("SUM", 2.0),
            lambda: context().all_reduce("SUM", jnp.array([True])),
            lambda: context().all_reduce("SUM", jax.random.key(0)),
            lambda: context().all_reduce("PRODUCT", jnp.ones(1)),
            lambda: context().all_gather(jnp.float32(1), 0),
            lambda: context().all_gather(jnp.ones(1), 1),
            lambda: strategy.reduce("SUM", jnp.ones(1), axis=None),
            lambda: strategy.run(lambda: 1),
        ]
        errors = [attempt(lambda call=call: strategy.run(call)) for call in calls]
        return [hash_of(x) for e in errors for x in flat(strategy, e) if isinstance(x, str)] or 0

    assert_agree(make, program)


@on_each
@pytest.mark.parametrize("aggregation", ["MEAN", "SUM"])
def test_train_state_on_uneven_batches(make, aggregation):
    """11 examples in batches of 4: with three replicas also a replica without any."""

    def program(strategy):
        with strategy.scope():
            tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
            state = distrib.TrainState.create(
                apply_fn=None,
                params={"w": jnp.ones(3), "b": jnp.float32(0)},
                tx=tx,
                batch_stats={"mean": jnp.zeros(3)},
            )
            loss_seen = distrib.metrics.Mean()
            right = distrib.metrics.Accuracy()

        def step(x):
            def loss_of(params):
                logits = x @ params["w"] + params["b"]
                loss = (logits - 1) ** 2
                mean = loss.mean() if aggregation == "MEAN" else loss.sum() / 4
                return mean, (loss, logits)

            gradients, (losses, logits) = jax.grad(loss_of, has_aux=True)(state.params)
            new = 0.9 * state.batch_stats["mean"] + 0.1 * x.mean(0)
            state.apply_gradients(
                grads=gradients, aggregation=aggregation, batch_stats={"mean": new}
            )
            loss_seen.update_state(losses)
            labels = (x[:, 0] > 0).astype(jnp.int32)
            right.update_state(labels, jnp.stack([-logits, logits], -1))
            return losses

        losses = []
        for _ in range(2):
            for batch in strategy.experimental_distribute_dataset(DATA, batch_size=4):
                losses.append(strategy.run(step, args=(batch,)))
        strategy.extended.assert_mirrored(state)
        return (
            losses,
            (state.params, state.opt_state, state.batch_stats, state.step),
            (loss_seen.result(), right.result()),
        )

    assert_agree(make, program)


@on_each
def test_accumulated_gradients_and_replace(make):
    def program(strategy):
        with strategy.scope():
            tx = optax.MultiSteps(optax.adamw(0.1), every_k_schedule=2)
            state = distrib.TrainState.create(
                apply_fn=None, params={"w": jnp.ones(3)}, tx=tx, ema={"w": jnp.zeros(3)}
            )

        def step(x):
            gradients = jax.grad(lambda p: ((x @ p["w"]) ** 2).mean())(state.params)
            state.apply_gradients(grads=gradients)
            state.replace(ema=jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, state.ema, state.params))
            return state.step

        steps = [
            strategy.run(step, args=(batch,))
            for batch in strategy.experimental_distribute_dataset(DATA, batch_size=4)
        ]
        return steps, state.params, state.opt_state, state.ema

    assert_agree(make, program)


@on_each
def test_gradients_that_are_combined_already(make):
    def program(strategy):
        with strategy.scope():
            state = distrib.TrainState.create(
                apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1, momentum=0.9)
            )

        def step(x):
            gradients = jax.grad(lambda p: ((x @ p["w"]) ** 2).sum() / len(DATA))(state.params)
            total = context().all_reduce("SUM", gradients)
            return state.apply_gradients(grads=total, aggregation=None).params

        (batch,) = strategy.experimental_distribute_dataset(DATA, batch_size=len(DATA))
        return strategy.run(step, args=(batch,)), state.params, state.opt_state

    assert_agree(make, program)


@on_each
def test_keys_draw_the_same(make):
    def program(strategy):
        with strategy.scope():
            state = distrib.TrainState.create(
                apply_fn=None,
                params={"w": jnp.ones(3)},
                tx=optax.sgd(0.1),
                keys={"dropout": jax.random.key(3)},
            )

        def step(x, key):
            kept = jax.random.bernoulli(state.keys["dropout"], 0.5, x.shape)
            noise = jax.random.normal(distrib.random.replica_key(key), (2,))
            gradients = jax.grad(lambda p: ((x * kept) @ p["w"]).mean())(state.params)
            state.apply_gradients(grads=gradients)
            return kept, noise, state.keys

        batches = strategy.experimental_distribute_dataset(DATA, batch_size=4)
        results = [strategy.run(step, args=(b, jax.random.key(1))) for b in batches]
        return results, state.params

    assert_agree(make, program)


@on_each
def test_arguments_of_every_kind(make):
    def program(strategy):
        x = of_replicas(strategy, lambda i: i * 3 + 1)
        y = of_replicas(strategy, lambda i: {"y": np.float32([i, 1])})
        with strategy.scope():
            v = distrib.Variable([1.0, 2.0], aggregation=Aggregation.MEAN)
            w = distrib.Variable(3.0)

        def step(x, y, n, f, array, mirrored, variable, flag, *, name):
            assert flag is True and name == "n"  # noqa: PT018 - constants
            variable.assign_add(jnp.ones(2))
            return {"x": x * n, "y": y, "f": f * array, "m": mirrored * n + w, "const": (7, name)}

        mirrored_value = v.assign([1.0, 2.0])
        args = (x, y, 2, 1.5, np.arange(2), mirrored_value, v, True)
        result = strategy.run(step, args=args, kwargs={"name": "n"})
        assert result["const"] == (7, "n")
        return {k: result[k] for k in ("x", "y", "f", "m")}, v

    with jax.numpy_rank_promotion("allow"):
        assert_agree(make, program)
