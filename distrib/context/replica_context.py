"""The interface of a replica: who it is, and how it meets the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from distrib.context.stack import current_frame
from distrib.errors import ContextError, UnsupportedError
from distrib.reduce_op import ReduceOp
from distrib.values import is_slices


class ReplicaMeeting(Protocol):
    """How the replicas of one engine meet; each engine brings its own."""

    def all_reduce(self, op: ReduceOp, value: Any, options: Any) -> Any:
        """Reduce a tree over the replicas and return the result on each."""
        ...

    def all_gather(self, value: Any, axis: int, options: Any) -> Any:
        """Concatenate a tree over the replicas and return the result on each."""
        ...

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any], kwargs: dict) -> Any:
        """Call ``merge_fn`` once for all replicas, in cross-replica context."""
        ...


class ReplicaContext:
    """What :func:`distrib.get_replica_context` returns inside ``strategy.run``.

    Args:
      strategy: the strategy whose ``run`` calls the replicas.
      replica_id_in_sync_group: which replica this is, from 0; an ``int32`` scalar that is traced in
        a compiled step.
      meeting: how the replicas of this engine meet.
      devices: the device string of this replica, in a tuple of one.
    """

    def __init__(
        self,
        strategy: Any,
        replica_id_in_sync_group: Any,
        meeting: ReplicaMeeting,
        devices: tuple[str, ...] = (),
    ):
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._meeting = meeting
        self._devices = devices

    @property
    def strategy(self) -> Any:
        """The strategy that this replica belongs to."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        """Which replica this is, ``0 .. num_replicas_in_sync - 1``, as an ``int32`` scalar.

        In a compiled step one program serves all replicas, so the id is a traced value: use it in
        ``jnp.where`` or ``jax.lax.cond``, not in a Python ``if``.
        """
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part, over all workers."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, in a tuple of one.

        In a compiled step, where one program serves every replica, the index is ``*``.
        """
        return self._devices

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Reduce ``value`` over the replicas; every replica gets the result.

        Collective: every replica must call it. Differentiable, and its gradient is the all-reduce
          of
        the incoming gradients with the same op, as in tf.distribute.

        Args:
          reduce_op: ``ReduceOp`` or its name.
          value: a tree of arrays, of the same shapes on every replica. A leaf may be an
            :class:`distrib.IndexedSlices`: the result is one with the rows of all replicas, each
            of which merges its rows of equal index first. In a compiled step whose replicas have
            unequal shapes, the whole table travels, and the result has every row of it.
          options: a :class:`distrib.experimental.CommunicationOptions`, or None. A compression
            rounds values anew in each call: nothing of what is lost is kept for the next, as
            ``TrainState.apply_gradients`` does with ``int8`` of the strategy's cross-device ops.

        Returns:
          A tree of arrays of those shapes. ``MEAN`` of integers is floating point.

        Raises:
          ContextError: outside of this replica's code, such as in a merge function.
          TypeError: if a leaf is not an array, a Python number for one.
          ValueError: if ``reduce_op`` is unknown, or the options have a timeout in a compiled step.
        """
        self._require_current("all_reduce")
        return self._meeting.all_reduce(ReduceOp.parse(reduce_op), value, options)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate ``value`` over the replicas along ``axis``; every replica gets the result.

        Args:
          value: a tree of arrays of rank 1 or more, ``[..., k, ...]`` along ``axis``.
          axis: the axis to concatenate, in replica order; negative counts from the end.
          options: a :class:`distrib.experimental.CommunicationOptions`, or None. Each array is
            gathered alone and exactly: packs, the ring and compression are for sums.

        Returns:
          A tree of arrays ``[..., num_replicas_in_sync * k, ...]``.

        Raises:
          ContextError: as of :meth:`all_reduce`.
          NotImplementedError: for an :class:`distrib.IndexedSlices`.
          TypeError: if a leaf is not an array.
          ValueError: if a leaf is a scalar or has no such axis, or the options ask for a
            compression, the ring, or, in a compiled step, a timeout.
        """
        self._require_current("all_gather")
        if any(map(is_slices, jax.tree.leaves(value, is_leaf=is_slices))):
            raise UnsupportedError(
                "all_gather does not support IndexedSlices, whose parts are no rows of one array. "
                "Gather x.to_dense(), or x.values and x.indices, or use all_reduce."
            )
        return self._meeting.all_gather(value, axis, options)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict | None = None
    ) -> Any:
        """Leave the replicas for a moment: call ``merge_fn`` once, in cross-replica context.

        Args:
          merge_fn: called as ``merge_fn(strategy, *args, **kwargs)``, each argument a tree of
            per-replica values.
          args: this replica's positional arguments.
          kwargs: this replica's keyword arguments.

        Returns:
          What ``merge_fn`` returned; of per-replica values, this replica's component.

        Raises:
          ContextError: as of :meth:`all_reduce`.
        """
        self._require_current("merge_call")
        return self._meeting.merge_call(merge_fn, tuple(args), dict(kwargs or {}))

    def _require_current(self, what: str) -> None:
        frame = current_frame()
        if frame.replica is self:
            return
        if frame.replica is None and frame.program is not None:
            raise ContextError(
                f"{what} was called inside a merge function, where there is no replica. Use the "
                "strategy that the merge function was given."
            )
        raise ContextError(
            f"{what} was called on the context of a replica outside of its code: call "
            "distrib.get_replica_context() where you use it."
        )
