"""The only file of distrib that touches private or version-dependent JAX.

Everything here was tried on JAX 0.10 and on the newest release, 0.12. Where a private name
disappears, the function falls back to public JAX, and its docstring says what is lost.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core as jax_extend_core
from jax.sharding import Sharding, SingleDeviceSharding

try:
    from jax._src.core import trace_state_clean as _trace_state_clean
except ImportError:
    _trace_state_clean = None
try:
    from jax._src.core import trace_ctx as _trace_context
except ImportError:
    _trace_context = None
try:
    from jax._src.array import ArrayImpl as _ArrayImpl
except ImportError:
    _ArrayImpl = None
try:
    from jax._src.xla_bridge import backends_are_initialized as _backends_are_initialized
except ImportError:
    _backends_are_initialized = None
try:
    from jax._src.interpreters.pxla import batched_device_put as _batched_device_put
except ImportError:
    _batched_device_put = None

try:
    from jax._src.config import trace_context as _settings_of_traces
except ImportError:
    _settings_of_traces = None

if TYPE_CHECKING:

    class Device:
        """A ``jax.Device``, for type checkers: JAX ships no types for its compiled classes."""

        id: int
        platform: str
        process_index: int

else:
    Device = jax.Device


def backends_initialized() -> bool:
    """Return whether JAX has started, that is, has looked up its devices.

    Asking does not start it. Without the private function the answer comes from a setting that JAX
    refuses to change once it has started; it is changed for a moment and put back.
    """
    if _backends_are_initialized is not None:
        return _backends_are_initialized()
    current = configured_cpu_devices()
    try:
        jax.config.update("jax_num_cpu_devices", current + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", current)
    return False


def configured_cpu_devices() -> int:
    """Return the setting ``jax_num_cpu_devices``, which also reads ``JAX_NUM_CPU_DEVICES``.

    It is -1 where the user has not set it.
    """
    return getattr(jax.config, "jax_num_cpu_devices", -1)  # The type of config lacks its settings.


def trace_token() -> Any:
    """Return an object that compares equal to another while the same JAX trace is current.

    Outside every transformation the tokens of all threads are equal. A token does not keep its
    trace alive. It has no hash: compare it, do not use it as a key.

    >>> trace_token() == trace_token()
    True
    >>> before = trace_token()
    >>> jax.eval_shape(lambda: print(trace_token() == before))
    False
    """
    return jax_extend_core.get_opaque_trace_state(convention="nnx")


def under_trace() -> bool:
    """Return whether this thread is inside a JAX transformation (jit, grad, vmap, make_jaxpr, ...).

    >>> under_trace()
    False
    >>> jax.eval_shape(lambda: print(under_trace()))
    True
    """
    if _trace_state_clean is not None:
        return not _trace_state_clean()
    return trace_token() != _token_outside_every_trace()


def under_jit() -> bool:
    """Return whether this thread is tracing a function for ``jax.jit``, at any depth.

    What such a function reads becomes a constant of the program that JAX keeps. Without the private
    names the answer is False.

    >>> jax.grad(lambda x: [x, print(under_jit())][0])(1.0).item()
    False
    1.0
    >>> jax.jit(lambda x: [x, print(under_jit())][0])(1.0).item()
    True
    1.0
    """
    trace = getattr(_trace_context, "trace", None)
    while trace is not None:
        info = getattr(getattr(trace, "frame", None), "debug_info", None)
        if getattr(info, "traced_for", None) in ("jit", "pjit"):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


_SETTINGS = (
    "debug_infs",
    "debug_nans",
    "default_matmul_precision",
    "default_prng_impl",
    "disable_jit",
    "enable_x64",
    "numpy_dtype_promotion",
    "numpy_rank_promotion",
)
"""Settings of JAX that a ``with`` block of the same name changes for one thread."""


def thread_settings() -> dict[str, Any]:
    """Return the settings of JAX in this thread, for :func:`with_settings` in another."""
    return {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS}


def compilation_settings() -> Any:
    """Return the settings of JAX in this thread that a compiled program depends on; hashable.

    >>> before = compilation_settings()
    >>> with jax.enable_x64(True):
    ...     print(compilation_settings() == before)
    False
    """
    if _settings_of_traces is not None:
        return _settings_of_traces()
    return tuple(thread_settings().values())


@contextlib.contextmanager
def with_settings(settings: dict[str, Any]) -> Iterator[None]:
    """Give this thread the settings of another for the length of a ``with`` block.

    >>> with jax.debug_nans(True):
    ...     settings = thread_settings()
    >>> with with_settings(settings):
    ...     print(jax.config.jax_debug_nans)
    True
    """
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            # One that is equal already would only make JAX compile anew.
            if getattr(jax.config, f"jax_{name}") != value:
                stack.enter_context(getattr(jax, name)(value))
        yield


def uncommitted(array: jax.Array) -> jax.Array:
    """Return an array on the same buffer that JAX moves freely to other operands' devices.

    JAX refuses to mix arrays committed to different devices. The result of this function is like
    ``jnp.arange(3)``: in ``a + b`` it follows the other operand. Nothing is copied (about 2 µs), so
    deleting either array deletes both; donating one leaves the other usable, because JAX copies.

    Args:
      array: a concrete array on a single device.

    Returns:
      The uncommitted array; ``array`` itself if it is uncommitted already, or if this JAX has no
      way to make one.

    Raises:
      ValueError: if ``array`` lives on more than one device.
    """
    sharding = array.sharding
    if sharding.num_devices != 1:
        raise ValueError(
            f"uncommitted() takes an array on a single device, and this one of shape {array.shape} "
            f"lives on {sharding.num_devices}: pass one of its addressable_shards' data."
        )
    if _ArrayImpl is None or not array.committed:
        return array
    try:
        aval = array.aval
        if not isinstance(sharding, SingleDeviceSharding):
            # A mesh of one device would make JAX treat the array as part of that mesh, and so would
            # the abstract value, which has the mesh in it: it gets into JAX's caches of traces.
            (device,) = sharding.device_set
            sharding = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            aval = ShapedArray(array.shape, array.dtype, weak_type=array.weak_type)
        # The checks compare the array with its own sharding: skipping them halves the time.
        buffers: Any = [array]
        return _ArrayImpl(aval, sharding, buffers, committed=False, _skip_checks=True)
    except (TypeError, ValueError, AttributeError):
        return array  # The private constructor has changed: a committed array is still correct.


def jaxpr_function(closed_jaxpr: Any) -> Callable[..., list[Any]]:
    """Return the function that a closed jaxpr describes: flat arguments in, a list of arrays out.

    A result that is a constant comes out of JAX as a Python number; here it is an array.

    >>> closed = jax.make_jaxpr(lambda x: (x + 1, x * 2, 5))(3)
    >>> [int(value) for value in jaxpr_function(closed)(3)]
    [4, 6, 5]
    """
    evaluate = jax_extend_core.jaxpr_as_fun(closed_jaxpr)

    def function(*args: Any) -> list[Any]:
        return [
            result if isinstance(result, jax.Array) else jnp.asarray(result, form.dtype)
            for result, form in zip(evaluate(*args), closed_jaxpr.out_avals, strict=True)
        ]

    return function


def _token_outside_every_trace() -> Any:
    """Return the token of a fresh thread, which is inside no transformation."""
    tokens: list[Any] = []
    thread = threading.Thread(target=lambda: tokens.append(trace_token()))
    thread.start()
    thread.join()
    return tokens[0]


def bind_equation(equation: Any, values: list[Any]) -> list[Any]:
    """Apply one equation of a jaxpr to values, and return its results.

    >>> closed = jax.make_jaxpr(lambda x: x + 1)(3)
    >>> [int(value) for value in bind_equation(closed.jaxpr.eqns[0], [3, 1])]
    [4]
    """
    parameters = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        results = equation.primitive.bind(*values, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def is_sparse(value: Any) -> bool:
    """Return whether ``value`` is an array of ``jax.experimental.sparse``.

    That module takes a third of a second to import, and whoever has such an array has imported it.

    >>> from jax.experimental.sparse import BCOO
    >>> is_sparse(BCOO.fromdense(jnp.eye(2))), is_sparse(jnp.eye(2))
    (True, False)
    """
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(value, sparse.JAXSparse)


def put_pieces(
    array: np.ndarray, sharding: Sharding, pieces: Sequence[np.ndarray], devices: Sequence[Device]
) -> jax.Array:
    """Return what ``jax.device_put(array, sharding)`` returns.

    The way there through public JAX costs 30 us an array, this one 5. Without the private function
    it is the public way.

    Args:
      array: an array of the host.
      sharding: where its pieces go.
      pieces: what of ``array`` goes to each device.
      devices: all devices of ``sharding``, of this process, in the order of its mesh.

    >>> from distrib.platform import replica_mesh, split
    >>> mesh, rows = replica_mesh(jax.devices()[:2]), np.arange(4)
    >>> put_pieces(rows, split(mesh), [rows[:2], rows[2:]], list(mesh.devices.flat))
    Array([0, 1, 2, 3], dtype=int32)
    """
    if _batched_device_put is not None:
        wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        form = _placed_form(array.shape, array.dtype, sharding, wide)
        # A dtype that JAX does not hold as it is, a 64-bit one, has to be converted on the way.
        if form.dtype == array.dtype:
            return _batched_device_put(form, sharding, pieces, devices)
    return jax.device_put(array, sharding)


@functools.lru_cache(maxsize=1024)
def _placed_form(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, wide: bool) -> Any:
    """Return how JAX describes a placed array; ``wide`` is for the cache: the dtype follows it."""
    return jax.device_put(np.zeros(shape, dtype), sharding).aval
