"""Values of which each replica has a component, in cross-replica context, brought together.

The components go through the collectives that a compiled step would make, in a small program of
their own, so that whoever reduces gets the numbers of the same algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from distrib.collectives.algorithm import AllReduceAlgorithm
from distrib.collectives.in_program import all_reduce, all_reduce_with_feedback
from distrib.collectives.options import CommunicationOptions
from distrib.errors import AggregationError
from distrib.platform import REPLICA_AXIS, stack_parts
from distrib.reduce_op import ReduceOp

Choose = Callable[[CommunicationOptions | None], AllReduceAlgorithm]


class ComponentReducer:
    """Reduces components over the replicas of a mesh.

    Args:
      mesh: a device for each replica.
      choose: from the options of a call to the algorithm.
    """

    def __init__(self, mesh: Mesh, choose: Choose):
        self._mesh = mesh
        self._choose = choose
        self._size = mesh.devices.size
        self._programs: dict[Any, Callable[..., Any]] = {}

    def all_reduce(
        self,
        op: ReduceOp,
        components: Sequence[Sequence[Any]],
        options: CommunicationOptions | None = None,
    ) -> list[jax.Array]:
        """Reduce values, packed together as those of one ``all_reduce`` of a step are.

        Args:
          op: how.
          components: for each value the components, one for each replica, of equal shapes and
            dtypes.
          options: of the call.

        Returns:
          For each value an array that every device of the mesh holds entire.

        Raises:
          AggregationError: if the components of a value differ in shape or dtype, or are boolean.
        """

        def body(rows: list) -> list:
            return all_reduce(
                op,
                [row[0] for row in rows],
                num_replicas=self._size,
                ops=self._choose(options),
                options=options,
            )

        if not components:
            return []
        program = self._program(("all_reduce", op, options), body, PartitionSpec())
        return program(self._stacked(components))

    def all_reduce_with_feedback(
        self, op: ReduceOp, components: Sequence[Sequence[Any]], residuals: Sequence[Sequence[Any]]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Reduce values with error feedback.

        Args:
          op: how.
          components: for each value the components of the replicas.
          residuals: for each value what earlier calls rounded off, on each replica.

        Returns:
          For each value the result, which every device holds entire, and the new residuals
          ``[replica, ...]``.
        """

        def body(rows: list, residuals: list) -> tuple[list, list]:
            totals, errors = all_reduce_with_feedback(
                op,
                [row[0] for row in rows],
                [row[0] for row in residuals],
                num_replicas=self._size,
                ops=self._choose(None),
            )
            return totals, [error[None] for error in errors]

        specs = (PartitionSpec(), PartitionSpec(REPLICA_AXIS))
        program = self._program(("feedback", op), body, specs)
        return program(self._stacked(components), self._stacked(residuals))

    def _stacked(self, components: Sequence[Sequence[Any]]) -> list[jax.Array]:
        return [self._stack([jnp.asarray(part) for part in parts]) for parts in components]

    def _stack(self, parts: Sequence[jax.Array]) -> jax.Array:
        forms = [form(part) for part in parts]
        if len(set(forms)) > 1:
            raise AggregationError(
                f"The replicas bring {', '.join(forms)} to one all-reduce: shapes and dtypes must "
                "be equal. Reduce over the batch first."
            )
        return stack_parts(parts, parts[0].dtype, self._mesh)

    def _program(self, key: Any, body: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        """Return ``body`` compiled, which may look at the key and nothing else that changes."""
        if key not in self._programs:
            rows = PartitionSpec(REPLICA_AXIS)
            mapped = jax.shard_map(
                body, mesh=self._mesh, in_specs=rows, out_specs=out_specs, check_vma=False
            )
            self._programs[key] = jax.jit(mapped)
        return self._programs[key]


def form(array: Any) -> str:
    """Return dtype and shape of an array, for messages.

    >>> form(jnp.ones((2, 3)))
    'float32[2,3]'
    """
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
