"""What goes wrong around training leaves a clear error and a usable state."""

import re
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distrib
from distrib import errors
from tests.support.fresh_python import run_python, start_python
from tests.support.strategies import on_every_strategy, on_two_replicas

KINDS = [distrib.MirroredStrategy, distrib.CentralStorageStrategy]


# Devices.


@pytest.mark.parametrize("kind", KINDS)
def test_no_such_device(kind):
    with pytest.raises(errors.DeviceError, match=r"no device 'CPU:99'.*CPU:7"):
        kind(["CPU:0", "CPU:99"])


def test_no_such_single_device():
    with pytest.raises(errors.DeviceError, match="CPU:99"):
        distrib.OneDeviceStrategy("CPU:99")
    with pytest.raises(errors.DeviceError, match="CPU:99"):
        distrib.CentralStorageStrategy(["CPU:0", "CPU:1"], parameter_device="CPU:99")
    with pytest.raises(errors.DeviceError, match="TPU"):
        distrib.OneDeviceStrategy("TPU:0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "again", ["CPU:1", "/cpu:1", "/job:localhost/replica:0/task:0/device:CPU:1"]
)
def test_a_device_twice(kind, again):
    with pytest.raises(errors.DeviceError, match="CPU:1"):
        kind(["CPU:0", "CPU:1", again])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("none", [None, [], ()])
def test_no_devices_means_all(kind, none):
    assert kind(none).num_replicas_in_sync == 8


def test_virtual_devices_too_late():
    printed = run_python("""
    import distrib
    strategy = distrib.MirroredStrategy()
    try:
        distrib.config.set_logical_devices("CPU", 4)
    except RuntimeError as error:
        assert isinstance(error, distrib.errors.VirtualDevicesError), type(error)
        print(error)
    print(strategy.num_replicas_in_sync)
    """)
    message, replicas = printed.splitlines()
    assert "4 virtual CPU devices were asked for, but JAX has started already, with 1" in message
    assert 'distrib.config.set_logical_devices("CPU", 4) first thing' in message
    assert replicas == "1"


# Steps.


@on_two_replicas
def test_a_python_branch_on_the_replica_id(make_strategy):
    def step():
        if distrib.get_replica_context().replica_id_in_sync_group == 0:
            return 1.0
        return 2.0

    with pytest.raises(errors.TracedValueError, match=r"replica id.*jnp\.where or jax\.lax\.cond"):
        make_strategy().run(step)


@on_two_replicas
@pytest.mark.parametrize("convert", [float, int, bool, np.asarray], ids=lambda f: f.__name__)
def test_python_code_that_needs_the_value_of_data(make_strategy, convert):
    strategy = make_strategy()
    (batch,) = strategy.experimental_distribute_dataset(np.ones(2, np.float32), batch_size=2)
    with pytest.raises(errors.TracedValueError, match="known only when the step runs"):
        strategy.run(lambda x: convert(x.sum()), args=(batch,))


@on_every_strategy
def test_a_step_that_raises_leaves_everything_as_it_was(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0, aggregation=distrib.VariableAggregation.MEAN)
        state = distrib.TrainState.create(apply_fn=None, params={"w": 2.0}, tx=optax.adam(0.1))

    class Boom(Exception):
        pass

    def step(fail):
        v.assign_add(1.0)
        state.apply_gradients(grads={"w": jnp.ones(())})
        if fail:
            raise Boom("in the middle of the step")
        return v.value()

    def check(expected_v, expected_step):
        assert float(v) == expected_v
        assert int(state.step) == expected_step
        strategy.extended.assert_mirrored((v, state))
        assert not distrib.has_strategy()
        assert distrib.get_replica_context() is not None

    with pytest.raises(Boom, match="in the middle of the step"):
        strategy.run(step, args=(True,))
    check(1.0, 0)
    assert float(state.params["w"]) == 2.0
    strategy.run(step, args=(False,))
    check(2.0, 1)
    with pytest.raises(Boom):
        strategy.run(step, args=(True,))
    check(2.0, 1)
    strategy.run(step, args=(False,))
    check(3.0, 2)


@on_two_replicas
def test_a_merge_function_that_raises_leaves_everything_as_it_was(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0, aggregation=distrib.VariableAggregation.MEAN)

    def merge(strategy, x):
        raise KeyError("in the merge function")

    def step():
        v.assign(5.0)
        distrib.get_replica_context().merge_call(merge, args=(jnp.ones(2),))

    with pytest.raises(KeyError, match="in the merge function"):
        strategy.run(step)
    assert float(v) == 1.0
    assert not distrib.has_strategy()
    strategy.run(lambda x: v.assign(x), args=(5.0,))
    assert float(v) == 5.0


class Thing:
    """Not an array."""

    def __repr__(self):
        return "<a thing>"


@on_every_strategy
def test_an_output_that_is_not_an_array(make_strategy):
    strategy = make_strategy()
    with strategy.scope():
        v = distrib.Variable(1.0, aggregation=distrib.VariableAggregation.MEAN)

    def step():
        v.assign(2.0)
        return {"loss": jnp.ones(()), "info": [1, Thing()]}

    with pytest.raises(errors.OutputError) as raised:
        strategy.run(step)
    for text in (
        "<a thing> of type Thing",
        "info",
        "which is not an array",
        "keep other objects outside",
    ):
        assert text in str(raised.value)
    assert float(v) == 1.0


@on_two_replicas
def test_a_traced_value_that_escapes(make_strategy):
    strategy = make_strategy()
    kept = []
    strategy.run(lambda x: kept.append(x), args=(1.0,))
    with pytest.raises(errors.TracedValueError, match="escape"):
        strategy.run(lambda: kept[0] + 1)


# Ctrl-C.

INTERRUPTED = """
import gc, os, random, signal, sys, threading, time
import distrib
distrib.config.set_logical_devices("CPU", 4)
import jax, jax.numpy as jnp, numpy as np, optax

kind, where, rounds = {kind!r}, {where!r}, {rounds}
strategy = getattr(distrib, kind)(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
rng = random.Random(0)

# Each step takes 1 off w and adds 1 to the counters, on every copy or on none.
with strategy.scope():
    params = {{"w": jnp.zeros(()), "unused": jnp.ones((50, 50))}}
    state = distrib.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    count = distrib.Variable(0.0, aggregation=distrib.VariableAggregation.MEAN)

def make_step():
    def step(x):
        grads = jax.grad(lambda p: (p["w"] * x).mean() + 0.0 * p["unused"].sum())(state.params)
        state.apply_gradients(grads=grads)
        count.assign_add(1.0)
        return x.sum()
    return step

class Loader:
    def __iter__(self):
        while True:
            if where == "prefetch":
                time.sleep(0.02)
            yield np.ones(8, np.float32)

batches = iter(strategy.experimental_distribute_dataset(Loader()))
step = make_step()
strategy.run(step, args=(next(batches),))
slowest = 0.0
for round in range(rounds):
    if where == "compilation":
        step = make_step()
    delay = rng.uniform(0.0, 0.3 if where == "compilation" else 0.05)
    sent = []

    def interrupt():
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(delay, interrupt)
    try:
        timer.start()
        while True:
            strategy.run(step, args=(next(batches),))
            if sent and time.monotonic() - sent[0] > 10:
                sys.exit("the interrupt of round %d was lost" % round)
    except KeyboardInterrupt:
        took = time.monotonic() - sent[0]
        slowest = max(slowest, took)
    timer.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not distrib.has_strategy() and not distrib.in_cross_replica_context()
    strategy.extended.assert_mirrored((state, count))
    steps = int(state.step)
    values = (steps, float(count), -float(state.params["w"]))
    assert values == (steps, steps, steps), values
    strategy.run(step, args=(next(batches),))
    assert int(state.step) == steps + 1
    strategy.extended.assert_mirrored((state, count))
batches.close()
print("slowest", slowest)
"""


@pytest.mark.parametrize("kind", ["MirroredStrategy", "CentralStorageStrategy"])
@pytest.mark.parametrize(("where", "rounds"), [("step", 60), ("prefetch", 40), ("compilation", 15)])
def test_ctrl_c_leaves_the_state_usable(kind, where, rounds):
    printed = run_python(INTERRUPTED.format(kind=kind, where=where, rounds=rounds))
    # A compilation is not interrupted, and a small one takes less than a second.
    assert float(printed.split()[-1]) < 2.0


PRESSED_ONCE = """
import sys, threading, time
import distrib
distrib.config.set_logical_devices("CPU", 2)
import numpy as np
strategy = distrib.MirroredStrategy()
with strategy.scope():
    total = distrib.metrics.Sum()

class Loader:
    def __iter__(self):
        yield np.ones(4, np.float32)
        while {stuck}:
            time.sleep(60)
        while True:
            yield np.ones(4, np.float32)

for batch in strategy.experimental_distribute_dataset(Loader()):
    strategy.run(total.update_state, args=(batch,))
    print("training", flush=True)
"""


@pytest.mark.parametrize("stuck", [False, True], ids=["training", "in a loader that is stuck"])
def test_ctrl_c_ends_a_script(stuck):
    with start_python(PRESSED_ONCE.format(stuck=stuck)) as process:
        try:
            assert process.stdout.readline() == "training\n"
            pressed = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, log = process.communicate(timeout=60)
            took = time.monotonic() - pressed
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert log.rstrip().endswith("KeyboardInterrupt")
    assert "Fatal" not in log
    assert took < 2.0


# Loaders.


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("distrib-prefetch")]


@on_every_strategy
@pytest.mark.parametrize("at", [0, 3])
def test_a_loader_that_raises_in_the_middle(make_strategy, at):
    class Broken(Exception):
        pass

    class Loader:
        def __iter__(self):
            for i in range(10):
                if i == at:
                    raise Broken(f"batch {i} is unreadable")
                yield np.full(4, i, np.float32)

    strategy = make_strategy()
    with strategy.scope():
        total = distrib.metrics.Sum()
    seen = []
    with pytest.raises(Broken, match=re.escape(f"batch {at} is unreadable")) as raised:
        for batch in strategy.experimental_distribute_dataset(Loader()):
            strategy.run(total.update_state, args=(batch,))
            seen.append(batch)
    assert len(seen) == at
    assert float(total.result()) == 4 * sum(range(at))
    assert any(entry.name == "__iter__" for entry in raised.traceback)  # Where it was raised.
    del raised
    for thread in prefetch_threads():
        thread.join(2.0)
    assert not prefetch_threads()


# Many replicas on few cores.

THOUSAND_STEPS = """
import distrib
distrib.config.set_logical_devices("CPU", 8)
import jax, jax.numpy as jnp, numpy as np, optax
strategy = distrib.MirroredStrategy()
assert strategy.num_replicas_in_sync == 8
with strategy.scope():
    params = {"a": jnp.full((64, 64), 0.01), "b": jnp.zeros(64), "large": jnp.zeros((200, 200))}
    state = distrib.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

def step(x):
    def loss(p):
        h = jnp.tanh(x @ p["a"] + p["b"][None])
        mean = jax.lax.pmean(h.mean(0), distrib.REPLICA_AXIS)
        return ((h - mean[None]) ** 2).mean() + (p["large"] ** 2).sum()
    value, grads = jax.value_and_grad(loss)(state.params)
    state.apply_gradients(grads=grads)
    return distrib.get_replica_context().all_reduce("MEAN", value)

data = np.random.default_rng(0).normal(size=(1600, 64)).astype(np.float32)
steps = 0
while steps < 1000:
    for batch in strategy.experimental_distribute_dataset(data, batch_size=32):
        value = strategy.run(step, args=(batch,))
        steps += 1
strategy.extended.assert_mirrored(state)
assert np.isfinite(value.values[7])
print("steps", int(state.step))
"""


def test_eight_virtual_devices_do_not_deadlock():
    assert run_python(THOUSAND_STEPS, timeout=120).split() == ["steps", "1000"]
