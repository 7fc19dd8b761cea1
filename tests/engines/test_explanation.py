"""What a step reads, writes, takes, returns, sends and compiles to, in numbers."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distrib
from distrib import errors
from distrib.engines.explanation import Explanation, Returned, Taken
from distrib.engines.hlo import Form, Sent
from tests.support.strategies import central, devices, mirrored, on_every_strategy

SUM, MEAN = distrib.VariableAggregation.SUM, distrib.VariableAggregation.MEAN
ON_READ = distrib.VariableSynchronization.ON_READ

# 784-128-10: 100352 + 128 + 1280 + 10 elements of four bytes.
PARAMETER_BYTES = 407_080


def mlp_params():
    return {
        "w1": jnp.zeros((784, 128)),
        "b1": jnp.zeros(128),
        "w2": jnp.zeros((128, 10)),
        "b2": jnp.zeros(10),
    }


def mnist_step(strategy):
    with strategy.scope():
        state = distrib.TrainState.create(apply_fn=None, params=mlp_params(), tx=optax.sgd(0.1))

    def loss_of(p, x, y):
        hidden = jax.nn.relu(x @ p["w1"] + p["b1"][None])
        logits = hidden @ p["w2"] + p["b2"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(x, y):
        loss, grads = jax.value_and_grad(loss_of)(state.params, x, y)
        state.apply_gradients(grads=grads)
        return {"loss": loss}

    return state, step


def mnist_batch(strategy, count=16):
    x, y = np.zeros((count, 784), np.float32), np.zeros(count, np.int32)
    return next(iter(strategy.experimental_distribute_dataset((x, y), batch_size=16)))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    ("ops", "kind"), [(None, "all-reduce"), (distrib.ReductionToOneDevice(), "all-gather")]
)
def test_a_step_of_mnist(count, ops, kind):
    strategy = distrib.MirroredStrategy(devices(count), cross_device_ops=ops)
    state, step = mnist_step(strategy)
    found = strategy.extended.explain(step, mnist_batch(strategy))
    names = ["params['b1']", "params['b2']", "params['w1']", "params['w2']", "step"]
    assert [use.name for use in found.reads] == names
    assert [use.name for use in found.writes] == names
    assert found.reads[0].form == Form("float32", (128,), 512)
    assert {use.lives for use in found.reads} == {f"a copy on each of {count} devices"}
    assert sum(use.form.nbytes for use in found.writes) == PARAMETER_BYTES + 4
    part = 16 // count
    assert found.takes == (
        Taken("args[0]", "a part for each replica", (Form("float32", (part, 784), part * 3136),)),
        Taken("args[1]", "a part for each replica", (Form("int32", (part,), part * 4),)),
    )
    assert found.returns == (Returned("output['loss']", Form("float32", (), 4)),)
    # Every gradient is sent once, by whatever algorithm; XLA joins them into one message.
    assert {sent.kind for sent in found.sends} == {kind}
    assert found.sent_bytes == PARAMETER_BYTES
    assert found.donated_bytes == PARAMETER_BYTES + 4
    assert found.num_programs == 1
    assert found.devices == tuple(devices(count))
    assert found.memory.arguments >= PARAMETER_BYTES + part * 3140
    assert found.flops > 2 * part * 784 * 128
    text = strategy.extended.compiled_text(step, mnist_batch(strategy))
    assert found.hlo_lines == len(text.splitlines())
    # Nothing has run.
    assert int(state.step) == 0


@on_every_strategy
def test_run_uses_what_was_compiled(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0, name="v", aggregation=SUM)
    traced = []

    def step(x):
        traced.append(1)
        v.assign_add(x)

    strategy.extended.explain(step, kwargs={"x": np.float32(2.0)})
    assert (len(traced), float(v.numpy())) == (1, 1.0)
    strategy.run(step, kwargs={"x": np.float32(2.0)})
    assert len(traced) == 1
    assert float(v.numpy()) == 1.0 + 2.0 * strategy.num_replicas_in_sync


def test_an_all_gather():
    strategy = mirrored(4)

    def step(x):
        return distrib.get_replica_context().all_gather(x, axis=0)

    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.zeros((2, 3)))
    found = strategy.extended.explain(step, (x,))
    assert found.sends == (Sent("all-gather", (Form("float32", (2, 3), 24),)),)
    assert found.returns == (Returned("output", Form("float32", (8, 3), 96)),)
    assert (found.reads, found.writes, found.donated_bytes) == ((), (), 0)


def test_a_collective_in_a_loop():
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda i, y: jax.lax.psum(y, distrib.REPLICA_AXIS), x)

    found = mirrored(2).extended.explain(step, (jnp.ones(5),))
    assert found.sends == (Sent("all-reduce", (Form("float32", (5,), 20),), in_loop=True),)
    assert "all-reduce, in a loop" in str(found)


def test_one_replica_sends_nothing():
    strategy = distrib.OneDeviceStrategy("CPU:0")
    _, step = mnist_step(strategy)
    found = strategy.extended.explain(step, mnist_batch(strategy))
    assert (found.sends, found.sent_bytes) == ((), 0)
    assert {use.lives for use in found.writes} == {"on CPU:0"}
    assert found.takes[0].kind == "the same on every replica"
    assert found.donated_bytes == PARAMETER_BYTES + 4
    assert "1 replica on CPU:0" in str(found)


def test_central_storage_copies_variables_out_and_gradients_back():
    strategy = central(2)
    _, step = mnist_step(strategy)
    found = strategy.extended.explain(step, mnist_batch(strategy))
    assert len(found.reads) == 4  # The step is counted where it is.
    assert len(found.writes) == 5
    assert {use.lives for use in found.writes} == {"on CPU:0"}
    kinds = [sent.kind for sent in found.sends]
    assert kinds[-2:] == ["copy to the replicas", "copy to the device of the variables"]
    out, back = found.sends[-2:]
    assert (out.count, out.nbytes) == (2, 2 * PARAMETER_BYTES)
    assert back.nbytes == PARAMETER_BYTES
    assert sum(sent.nbytes for sent in found.sends[:-2]) == PARAMETER_BYTES
    assert (found.num_programs, found.donated_bytes) == (2, 0)


def test_uneven_batches():
    strategy = mirrored(4)
    _, step = mnist_step(strategy)
    found = strategy.extended.explain(step, mnist_batch(strategy, 14))
    assert found.takes[1] == Taken(
        "args[1]",
        "a part for each replica, of unequal shapes",
        tuple(Form("int32", (n,), 4 * n) for n in (4, 4, 4, 2)),
    )
    assert sum(s.nbytes for s in found.sends if s.kind == "all-reduce") == PARAMETER_BYTES


def test_variables_of_each_replica_and_foreign_ones():
    strategy, other = mirrored(2), distrib.OneDeviceStrategy("CPU:3")
    with strategy.scope():
        total = distrib.Variable(0.0, name="total", synchronization=ON_READ, aggregation=SUM)
    with other.scope():
        scale = distrib.Variable([1.0, 2.0], name="scale")
    found = strategy.extended.explain(lambda x: total.assign_add(x * scale[0]), (1.0,))
    assert [(use.name, use.lives, use.synchronization) for use in found.reads] == [
        ("total", "one of its own on each of 2 devices", "ON_READ"),
        ("scale", "on CPU:3", "ON_WRITE"),
    ]
    assert [(use.name, use.aggregation) for use in found.writes] == [("total", "SUM")]
    assert found.sends == (Sent("copy to the replicas", (Form("float32", (2,), 8),), count=2),)


def test_other_arguments_and_outputs():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0, name="v", aggregation=SUM)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def step(model, v, rate, mode):
        model.bias[...] = model.bias[...] + 1
        return v, mode, model.bias[...], 3

    found = strategy.extended.explain(step, (model, v, 0.1), {"mode": "train"})
    assert found.takes == (
        Taken("args[0]", "NNX Linear, changed in place", ()),
        Taken("args[1]", "variable v", ()),
        Taken("args[2]", "the same on every replica", (Form("float32", (), 4),)),
        Taken("kwargs['mode']", "a constant of the program", ()),
    )
    assert [(each.path, each.value) for each in found.returns] == [
        ("output[0]", "variable v"),
        ("output[1]", "'train'"),
        ("output[2]", ""),
        ("output[3]", "3"),
    ]
    np.testing.assert_array_equal(model.bias[...], [0.0])


@jax.tree_util.register_pytree_node_class
class OfArrays:
    """A node that is built of arrays only."""

    def __init__(self, array):
        self.array = array + 0

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_a_node_that_takes_arrays_only_can_be_run():
    result = mirrored(2).run(lambda x: OfArrays(x).array, args=(1.0,))
    assert float(result.values[0]) == 1.0
    result = distrib.OneDeviceStrategy("CPU:0").run(lambda x: OfArrays(x), args=(1.0,))
    assert float(result.array) == 1.0


def test_a_step_keeps_no_variable_alive():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(1.0, aggregation=SUM)
    holder = [v]

    def step():
        return holder[0].assign_add(jnp.ones(()))

    strategy.extended.explain(step)
    dead = weakref.ref(v)
    del v
    holder.clear()
    gc.collect()
    assert dead() is None


def test_keys_of_random_numbers():
    found = mirrored(2).extended.explain(lambda key: key, (jax.random.key(0),))
    assert found.takes[0].forms == (Form("key<fry>", (), 8),)
    assert found.returns == (Returned("output", Form("key<fry>", (), 8)),)


def test_the_explanation_is_plain_data():
    found = mirrored(2).extended.explain(lambda x: x, (1.0,))
    assert isinstance(found, Explanation)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.flops = 3.0
    assert all(
        value is None or isinstance(value, str | int | float | tuple | dict)
        for value in dataclasses.asdict(found).values()
    )


def test_it_prints_as_tables():
    strategy = mirrored(2)
    with strategy.scope():
        v = distrib.Variable(jnp.zeros((3, 2)), name="kernel", aggregation=MEAN)

    def step(x):
        v.assign(x)

    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones((3, 2)))
    found = strategy.extended.explain(step, (x,))
    text = str(found)
    line = step.__code__.co_firstlineno
    assert text.splitlines()[:7] == [
        f"test_it_prints_as_tables.<locals>.step (test_explanation.py:{line}), 2 replicas on "
        "CPU:0, CPU:1",
        "",
        "reads nothing",
        "",
        "writes 1 variable, 24 bytes a copy",
        "  variable  value         bytes  lives                        synchronization  "
        "aggregation",
        "  kernel    float32[3,2]     24  a copy on each of 2 devices  ON_WRITE         MEAN",
    ]
    assert "sends 24 bytes, in 1 message\n" in text
    assert "compiles to 1 program\n" in text
    html = found._repr_html_()
    assert html.startswith("<div>") and "float32[3,2]" in html and "&lt;locals&gt;" in html


def test_it_is_refused_where_run_is():
    with pytest.raises(TypeError, match="default strategy"):
        distrib.get_strategy().extended.explain(lambda: None)
    strategy = mirrored(2)
    with pytest.raises(errors.NestedTraceError):
        strategy.run(lambda: strategy.extended.explain(lambda: 1))
