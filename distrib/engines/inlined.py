"""``strategy.run`` inside of a :func:`distrib.function`: the replica is a part of its program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distrib.context import Frame, entered
from distrib.engines.calls import unjitted
from distrib.engines.local_values import local_value
from distrib.engines.outputs import check_returned, is_array, is_end
from distrib.engines.signature import is_argument
from distrib.errors import ContextError, NestedTraceError
from distrib.platform.jax_compat import trace_token
from distrib.platform.pytree_paths import leaves_with_paths
from distrib.values import DistributedValues, Layout, PerReplica


@dataclass(frozen=True)
class InlinedReplicas:
    """The replicas of a program that begins in cross-replica context.

    Attributes:
      frame: the frame of the replica.
      size: how many replicas there are.
      token: the trace of the program.
    """

    frame: Frame
    size: int
    token: Any

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` in the replica, and return per-replica values.

        Raises:
          ContextError: for a batch that is no argument of the function.
          NestedTraceError: inside of a JAX transformation.
          OutputError: if ``fn`` returns an object that is no array.
        """
        if trace_token() != self.token:
            raise NestedTraceError(
                "strategy.run was called inside a JAX transformation (lax.scan, lax.cond, jax.grad "
                "...) of a distrib.function, whose values may not leave it. Transform the code "
                "inside of the replica, or repeat steps with RunOptions(steps_per_call=...)."
            )
        args, kwargs = jax.tree.map(self._entering, (tuple(args), kwargs), is_leaf=_is_argument)
        with entered(self.frame):
            result = unjitted(fn)(*args, **kwargs)
        for path, leaf in leaves_with_paths(result, is_leaf=is_end):
            if not is_array(leaf) and not isinstance(leaf, DistributedValues):
                check_returned(leaf, path)
        if self.size == 1:
            return result
        return jax.tree.map(
            lambda leaf: PerReplica.from_local(jnp.asarray(leaf)) if is_array(leaf) else leaf,
            result,
            is_leaf=is_end,
        )

    def _entering(self, leaf: Any) -> Any:
        """Return what the replica sees of an argument: as in a step of its own, arrays."""
        if isinstance(leaf, PerReplica) and leaf.layout is Layout.COMPONENTS:
            # Made inside of the function, by experimental_distribute_values_from_function.
            parts = jnp.stack([jnp.asarray(part) for part in leaf.values])
            return parts[self.frame.replica.replica_id_in_sync_group]  # pyright: ignore[reportOptionalMemberAccess]
        if isinstance(leaf, PerReplica) and leaf.whole is not None:
            raise ContextError(
                "strategy.run was given a per-replica value that is no argument of the "
                "distrib.function which calls it: its program would keep this one batch. Give the "
                "batch to the function: loop over the dataset outside, or use distrib.train_loop."
            )
        if isinstance(leaf, DistributedValues):
            return local_value(leaf)
        if isinstance(leaf, bool) or not isinstance(leaf, int | float | complex | np.ndarray):
            return leaf
        return jnp.asarray(leaf)


def _is_argument(node: Any) -> bool:
    return is_argument(node) or is_end(node)
