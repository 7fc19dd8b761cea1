"""What both engines check of a call to ``run`` before they make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distrib.errors import NestedTraceError
from distrib.platform import under_trace
from distrib.values import PerReplica


def check_outside_trace() -> None:
    """Check that no JAX transformation is being traced.

    Raises:
      NestedTraceError: if one is.
    """
    if under_trace():
        raise NestedTraceError(
            "strategy.run was called inside a JAX transformation (jax.jit, jax.grad, lax.scan "
            "...), where its variables cannot be written back. run compiles its function by "
            "itself: call it from plain Python, and put jax.jit or jax.grad inside the function. "
            "To make one program of run and the Python around it, use distrib.function in place "
            "of jax.jit."
        )


def check_components(leaves: Sequence[Any], num_replicas: int) -> None:
    """Check that per-replica arguments have a component for each replica.

    Raises:
      ValueError: if one has more or fewer.
    """
    for leaf in leaves:
        if isinstance(leaf, PerReplica):
            mesh = None if leaf.whole is None else leaf.whole.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
            count = len(leaf.values) if mesh is None else mesh.devices.size
            if count != num_replicas:
                raise ValueError(
                    f"strategy.run got a PerReplica with {count} components, and the strategy has "
                    f"{num_replicas} replicas: make it with this strategy, by "
                    "experimental_distribute_values_from_function or a distributed dataset."
                )


def unjitted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside of a jitted one: run compiles it anyway, with its variables."""
    if hasattr(fn, "lower") and hasattr(fn, "trace") and hasattr(fn, "__wrapped__"):
        return fn.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    return fn
