"""``Strategy``: the interface that training code uses. Each verb is a check and a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distrib.config import functions_run_eagerly
from distrib.context import (
    CanBeCurrent,
    Frame,
    current_frame,
    current_program,
    default_frame,
    entered,
    require_cross_replica_context,
    require_same_strategy,
)
from distrib.engines import RunOptions
from distrib.errors import ContextError
from distrib.input import (
    BatchPlacer,
    DistributedDataset,
    InputContext,
    InputOptions,
    datasets_from_function,
    distribute_dataset,
)
from distrib.platform import ends_with_users_line
from distrib.reduce_op import ReduceOp
from distrib.strategies.extended import StrategyExtended
from distrib.strategies.many_steps import run_with_options
from distrib.values import DistributedValues, ValueContext, regroup, select_replica
from distrib.variables import Variable

_MERGE = "use get_replica_context().merge_call()"


class Strategy(CanBeCurrent):
    """A way of spreading training over devices.

    Use one of its kinds: :class:`distrib.OneDeviceStrategy`, :class:`distrib.MirroredStrategy`,
    :class:`distrib.CentralStorageStrategy`. All have this interface, so that a script changes one
    line to change the strategy.

    Args:
      extended: the parts that the strategy is composed of.
    """

    def __init__(self, extended: StrategyExtended):
        self._extended = extended

    @property
    def extended(self) -> StrategyExtended:
        """The parts of the strategy, and functions for libraries."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are, over all workers."""
        return self._extended.combiner.num_replicas

    @property
    def cluster_resolver(self) -> None:
        """None: a strategy of one process has no cluster to look up."""
        return None

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this strategy current for the length of a ``with`` block, and yield it.

        Variables that are created inside live where the strategy puts them. The scope belongs to
        the thread that entered it.

        Raises:
          ContextError: inside the scope of another strategy, or in a replica's code.
        """
        require_cross_replica_context(self, "scope", "enter the scope outside of strategy.run")
        frame = current_frame()
        # Inside a merge function the program of the step stays current.
        with entered(Frame(self, None, frame.program)):
            yield self

    @ends_with_users_line
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call ``fn`` once for each replica, on its device, and return what the replicas returned.

        ``fn`` is compiled once for each structure, shape and dtype of its arguments, with the
        variables that it reads and changes; it need not be jitted. Define it once, outside of the
        loop: a function that is made anew, a lambda in a loop for one, is compiled anew. Not
        collective with other processes here. Does not block: the results are futures, as all arrays
        of JAX.

        Args:
          fn: the step, called in replica context as ``fn(*args, **kwargs)``.
          args: pytrees. Of a per-replica value each replica gets its component; an array, a NumPy
            array or a number is the same on every replica, and traced; booleans, strings and other
            objects are constants of the program. NNX modules and optimizers are changed in place.
          kwargs: the same by name.
          options: a :class:`distrib.RunOptions`: several steps in one call, options of XLA, an
            explanation; None for none.

        Returns:
          The tree that ``fn`` returned, a :class:`PerReplica` for each array (the array itself
          under a strategy of one replica); numbers, strings, None and variables as they are.

        Raises:
          ContextError: inside a step, or in the scope of another strategy.
          TracedValueError: if Python code in ``fn`` needs a value that exists only when the step
            runs.
          OutputError: if ``fn`` returns an object that is no array.
          TypeError: if ``args`` is no tuple or list, ``kwargs`` no dict, or ``options`` no
            ``RunOptions``.
        """
        if not isinstance(args, tuple | list) or not isinstance(kwargs or {}, dict):
            raise TypeError(
                f"run takes args as a tuple and kwargs as a dict, and got a {type(args).__name__} "
                f"and a {type(kwargs).__name__}: for one argument write args=(batch,)."
            )
        self._require_cross_replica("run")
        program = current_program()
        extended = self._extended
        engine = extended.eager_engine if functions_run_eagerly() else extended.engine
        if options is not None:
            return run_with_options(
                engine, extended.explain, program, fn, args, kwargs or {}, options
            )
        if program is not None:
            return program.run(fn, args, kwargs or {})
        return engine.run(fn, args, kwargs or {})

    @ends_with_users_line
    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Reduce ``value`` over the replicas. Cross-replica context.

        Args:
          reduce_op: ``ReduceOp`` or its name. With ``MEAN`` and an ``axis``, the sum of all
            elements is divided by their number, also where replicas have unequally many.
          value: a pytree of per-replica values.
          axis: the axis (or a tuple of axes) of the components to reduce as well; None for none.

        Returns:
          A pytree of arrays of the shape of a component, without ``axis``.

        Raises:
          ContextError: in replica context.
          AggregationError: for SUM, over several replicas, of a value that is no per-replica value;
            or if components cannot be added.
        """
        self._require_cross_replica("reduce")
        return self._extended.reduce_tree(ReduceOp.parse(reduce_op), value, axis)

    @ends_with_users_line
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the components of ``value`` along ``axis``. Cross-replica context.

        Args:
          value: a pytree of per-replica values ``[..., k, ...]``; ``k`` may differ by replica. A
            value that is not distributed is returned as it is.
          axis: the axis to concatenate, in replica order; negative counts from the end.

        Returns:
          A pytree of arrays.

        Raises:
          ContextError: in replica context.
          AggregationError: if a component has no such axis, or they differ in another one.
        """
        self._require_cross_replica("gather", "use get_replica_context().all_gather()")
        return self._extended.gather_tree(value, axis)

    @ends_with_users_line
    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_remainder: bool = False,
    ) -> DistributedDataset:
        """Distribute a dataset of global batches: each batch is cut over the replicas.

        A batch of ``m`` examples over ``n`` replicas is cut, left to right, into pieces of
        ``ceil(m / n)``; the last ones may be shorter or empty, and no example is dropped or
        repeated.

        Args:
          dataset: a pytree of arrays ``[example, ...]``, with ``batch_size``; or an iterable of
            batches ``[batch, ...]``: a list, a generator, a Grain dataset, a torch DataLoader, a
            tf.data.Dataset.
          options: how the input is placed and prefetched, and what becomes of a short batch.
          batch_size: examples in a global batch, over all replicas.
          shuffle: whether each epoch goes through the examples in a new order.
          seed: the seed of that order; drawn once if it is None.
          drop_remainder: whether to drop the last, short batch.

        Returns:
          A dataset whose elements are pytrees of per-replica values; of arrays if there is one
          replica. Each ``iter()`` is an epoch.

        Raises:
          InputError: if the dataset cannot be read.
        """
        options = options or InputOptions()
        distributed = distribute_dataset(
            dataset,
            self._placer(options),
            options,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_remainder=drop_remainder,
        )
        distributed.strategy = self
        return distributed

    @ends_with_users_line
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distribute the dataset that a function makes: its elements are not cut.

        Args:
          dataset_fn: called with an :class:`distrib.InputContext`, returns an iterable of batches
            of the size of one replica.
          options: how the input is placed, and whether there is a dataset for each replica.

        Returns:
          A dataset of which each replica draws its own element.

        Raises:
          InputError: if ``dataset_fn`` returns something that cannot be read.
        """
        options = options or InputOptions()
        distributed = datasets_from_function(dataset_fn, self._placer(options), options)
        distributed.strategy = self
        return distributed

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Make a per-replica value from a function.

        Args:
          value_fn: called with a :class:`distrib.experimental.ValueContext` for each replica.

        Returns:
          A per-replica value, or a pytree of them; what ``value_fn`` returned if there is one
          replica.
        """
        size = self.num_replicas_in_sync
        return regroup([value_fn(ValueContext(i, size)) for i in range(size)])

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of ``value`` on this process, in replica order.

        Of a value that is not distributed, a tuple of one; of a tree with distributed values in it,
        a tree for each replica.
        """
        if isinstance(value, DistributedValues | Variable):
            return tuple(value.values)
        if isinstance(value, dict | list | tuple):
            return tuple(select_replica(value, i) for i in range(self.num_replicas_in_sync))
        return (value,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        """Return the strategy itself: its devices cannot be copied, and variables refer to it."""
        return self

    def _placer(self, options: InputOptions) -> BatchPlacer:
        return BatchPlacer(self._extended.mesh, options.experimental_fetch_to_device)

    def _require_cross_replica(self, what: str, instead: str = _MERGE) -> None:
        frame = current_frame()
        if frame is default_frame() and frame.strategy is not self:
            return
        if frame.strategy is self and frame.replica is None:
            return
        require_same_strategy(self)
        if self is default_frame().strategy:
            return
        raise ContextError(
            f"Method strategy.{what} requires being in cross-replica context, but it was called "
            f"inside strategy.run: {instead}."
        )

    def __repr__(self) -> str:
        names = [name.rpartition("device:")[2] for name in self._extended.worker_devices]
        where = ", ".join(names) or "any device"
        return f"<distrib.{type(self).__name__} of {self.num_replicas_in_sync} on {where}>"
