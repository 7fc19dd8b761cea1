import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distrib.platform import jax_compat, mesh

TRANSFORMATIONS = {
    "jit": lambda f: jax.jit(f)(1.0),
    "grad": lambda f: jax.grad(f)(1.0),
    "vmap": lambda f: jax.vmap(f)(jnp.ones(2)),
    "jvp": lambda f: jax.jvp(f, (1.0,), (1.0,)),
    "vjp": lambda f: jax.vjp(f, 1.0),
    "linearize": lambda f: jax.linearize(f, 1.0),
    "make_jaxpr": lambda f: jax.make_jaxpr(f)(1.0),
    "eval_shape": lambda f: jax.eval_shape(f, 1.0),
    "scan": lambda f: jax.lax.scan(lambda c, _: (f(c), None), 1.0, length=2),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(1.0),
    "shard_map": lambda f: jax.shard_map(
        f,
        mesh=mesh.replica_mesh(jax.devices()[:2]),
        in_specs=jax.P("replica"),
        out_specs=jax.P("replica"),
    )(jnp.ones(2)),
}


@pytest.fixture(params=["private", "fallback"])
def with_and_without_private_jax(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(jax_compat, "_trace_state_clean", None)
        monkeypatch.setattr(jax_compat, "_backends_are_initialized", None)


@pytest.mark.usefixtures("with_and_without_private_jax")
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_under_trace(name):
    seen = []

    def step(x):
        seen.append(jax_compat.under_trace())
        return x * 2.0

    assert not jax_compat.under_trace()
    TRANSFORMATIONS[name](step)
    assert seen and all(seen)
    assert not jax_compat.under_trace()


@pytest.mark.usefixtures("with_and_without_private_jax")
def test_under_trace_is_of_this_thread():
    def step(x):
        seen = []
        thread = threading.Thread(target=lambda: seen.append(jax_compat.under_trace()))
        thread.start()
        thread.join()
        assert seen == [False]
        return x

    jax.eval_shape(step, 1.0)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_trace_token_differs_inside(name):
    outside = jax_compat.trace_token()
    seen = []

    def step(x):
        seen.append(jax_compat.trace_token())
        assert jax_compat.trace_token() == seen[-1]
        return x * 2.0

    TRANSFORMATIONS[name](step)
    assert all(token != outside for token in seen)
    assert jax_compat.trace_token() == outside


def test_trace_token_differs_in_a_nested_trace_and_comes_back():
    def outer(x):
        token = jax_compat.trace_token()

        def inner(y):
            assert jax_compat.trace_token() != token
            return y * x

        gradient = jax.grad(inner)(1.0)
        assert jax_compat.trace_token() == token
        return gradient

    assert float(jax.jit(outer)(3.0)) == 3.0


@pytest.mark.usefixtures("with_and_without_private_jax")
def test_backends_are_initialized_after_a_look_up():
    jax.devices()
    assert jax_compat.backends_initialized()


def test_uncommitted_follows_the_other_operand():
    first, second = (jax.device_put(jnp.arange(3.0), device) for device in jax.devices()[1:3])
    with pytest.raises(ValueError, match="incompatible devices"):
        _ = first + second
    free = jax_compat.uncommitted(first)
    assert not free.committed
    assert free.devices() == first.devices()
    assert free.unsafe_buffer_pointer() == first.unsafe_buffer_pointer()
    for total in (free + second, second + free, jax.jit(jnp.add)(free, second)):
        assert total.devices() == second.devices()
        np.testing.assert_array_equal(total, [0.0, 2.0, 4.0])
    assert jax.jit(lambda x: x + free)(second).devices() == second.devices()


def test_uncommitted_mixes_with_a_mesh():
    whole = mesh.replicated(mesh.replica_mesh(jax.devices()))
    copies = jax.device_put(jnp.arange(3.0), whole)
    copy = copies.addressable_shards[5].data
    assert (jax_compat.uncommitted(copy) + copies).sharding == whole


def test_uncommitted_from_a_mesh_of_one_device():
    one = mesh.replicated(mesh.replica_mesh(jax.devices()[4:5]))
    free = jax_compat.uncommitted(jax.device_put(jnp.arange(3.0), one))
    assert isinstance(free.sharding, jax.sharding.SingleDeviceSharding)
    assert (free + jax.device_put(1.0, jax.devices()[2])).devices() == {jax.devices()[2]}


def test_uncommitted_from_a_mesh_of_one_device_leaves_no_mesh_in_caches():
    # The trace of fold_in for a scalar with a mesh in its abstract value was used again for one
    # without, and refused a key on another mesh.
    for count in (1, 2):
        everywhere = mesh.replicated(mesh.replica_mesh(jax.devices()[:count]))
        step = jax.device_put(jnp.int32(0), everywhere).addressable_shards[0].data
        key = jax.random.wrap_key_data(
            jax.device_put(jax.random.key_data(jax.random.key(0)), everywhere)
        )
        folded = jax.random.fold_in(key, jax_compat.uncommitted(step))
        assert folded == jax.random.fold_in(jax.random.key(0), 0)


def test_uncommitted_keeps_dtype_and_weak_type():
    array = jax.device_put(jnp.float32(2.0), jax.devices()[1])
    weak = jax.device_put(jnp.asarray(2.0) * 1, jax.devices()[1])
    assert weak.weak_type and not array.weak_type
    for given in (array, weak):
        free = jax_compat.uncommitted(given)
        assert (free.dtype, free.weak_type) == (given.dtype, given.weak_type)
    key = jax.device_put(jax.random.key(7), jax.devices()[1])
    free = jax_compat.uncommitted(key)
    np.testing.assert_array_equal(jax.random.key_data(free), jax.random.key_data(key))


def test_uncommitted_returns_an_uncommitted_array_as_it_is():
    array = jnp.arange(3)
    assert jax_compat.uncommitted(array) is array


def test_donating_the_uncommitted_array_leaves_the_other_usable():
    array = jax.device_put(jnp.arange(3.0), jax.devices()[1])
    jax.jit(lambda x: x + 1, donate_argnums=0)(jax_compat.uncommitted(array))
    np.testing.assert_array_equal(array, [0.0, 1.0, 2.0])


def test_uncommitted_refuses_several_devices():
    split = jax.device_put(jnp.arange(8.0), mesh.split(mesh.replica_mesh(jax.devices())))
    with pytest.raises(ValueError, match=r"of shape \(8,\) lives on 8: pass one of its"):
        jax_compat.uncommitted(split)


@pytest.mark.parametrize("constructor", [None, lambda: None])
def test_uncommitted_without_the_private_constructor(monkeypatch, constructor):
    monkeypatch.setattr(jax_compat, "_ArrayImpl", constructor)
    array = jax.device_put(jnp.arange(3.0), jax.devices()[1])
    assert jax_compat.uncommitted(array) is array


def test_jaxpr_function():
    closed = jax.make_jaxpr(lambda x, y: {"sum": x + y, "product": x * y})(2.0, 3.0)
    product, total = jax.jit(jax_compat.jaxpr_function(closed))(4.0, 5.0)
    assert (float(product), float(total)) == (20.0, 9.0)


def test_jaxpr_function_makes_arrays_of_constants():
    closed = jax.make_jaxpr(lambda x: (x, 2.0, jnp.float16(3), True))(1)
    results = jax.jit(lambda x: [y[None] for y in jax_compat.jaxpr_function(closed)(x)])(1)
    assert [y.tolist() for y in results] == [[1], [2.0], [3.0], [True]]
    assert [y.dtype for y in results] == [jnp.int32, jnp.float32, jnp.float16, jnp.bool_]


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (jax.jit, True),
        (lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0]), True),
        (lambda f: jax.grad(jax.jit(f)), True),
        (jax.grad, False),
        (jax.checkpoint, False),
        (lambda f: lambda x: jax.lax.cond(x > 0, f, lambda y: y, x), False),
        (lambda f: lambda x: jax.vmap(f)(x[None]), False),
        (lambda f: f, False),
    ],
    ids=["jit", "scan-in-jit", "grad-of-jit", "grad", "checkpoint", "cond", "vmap", "nothing"],
)
def test_under_jit(transform, expected):
    seen = []

    def f(x):
        seen.append(jax_compat.under_jit())
        return x * 2

    transform(f)(jnp.float32(1))
    assert set(seen) == {expected}
    assert not jax_compat.under_jit()


def test_settings_are_carried_to_another_thread_and_no_further():
    with jax.enable_x64(True), jax.default_matmul_precision("highest"), jax.disable_jit(True):
        settings = jax_compat.thread_settings()
    seen = []

    def work():
        before = jax_compat.thread_settings()
        with jax_compat.with_settings(settings):
            seen.append((jax_compat.thread_settings(), jnp.asarray(np.float64(1)).dtype))
        seen.append(jax_compat.thread_settings() == before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(settings, jnp.float64), True]
