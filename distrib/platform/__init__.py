"""What distrib needs of the machine and of JAX: devices, the mesh, and JAX's private corners."""

from distrib.platform.devices import (
    device_string,
    local_devices,
    resolve_device,
    resolve_devices,
    short_device_string,
)
from distrib.platform.jax_compat import (
    Device,
    backends_initialized,
    bind_equation,
    compilation_settings,
    is_sparse,
    jaxpr_function,
    thread_settings,
    trace_token,
    uncommitted,
    under_jit,
    under_trace,
    with_settings,
)
from distrib.platform.mesh import REPLICA_AXIS, replica_mesh, replicated, split, stack_parts
from distrib.platform.pytree_paths import leaves_with_paths, path_string
from distrib.platform.shards import Shards, shards_of
from distrib.platform.tracebacks import (
    ends_with_users_line,
    stack_as_traceback,
    user_location,
)
from distrib.platform.virtual_devices import ensure_thread_pool, set_logical_devices

__all__ = [
    "Device",
    "REPLICA_AXIS",
    "Shards",
    "backends_initialized",
    "bind_equation",
    "compilation_settings",
    "device_string",
    "ends_with_users_line",
    "ensure_thread_pool",
    "is_sparse",
    "jaxpr_function",
    "leaves_with_paths",
    "local_devices",
    "path_string",
    "replica_mesh",
    "replicated",
    "resolve_device",
    "resolve_devices",
    "set_logical_devices",
    "shards_of",
    "short_device_string",
    "split",
    "stack_as_traceback",
    "stack_parts",
    "thread_settings",
    "trace_token",
    "uncommitted",
    "under_jit",
    "under_trace",
    "user_location",
    "with_settings",
]
