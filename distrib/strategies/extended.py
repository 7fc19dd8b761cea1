"""``strategy.extended``: the parts that a strategy is composed of, and what is seldom needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from distrib.collectives import CommunicationOptions, CrossDeviceOps
from distrib.context import (
    current_frame,
    require_cross_replica_context,
    require_same_strategy,
)
from distrib.engines.explanation import Explanation
from distrib.errors import ContextError, VariableError
from distrib.platform import Device, device_string, ends_with_users_line, is_sparse
from distrib.reduce_op import ReduceOp
from distrib.strategies.answers import Combiner, Engine, Runner, VariableHome
from distrib.strategies.destinations import destination_devices, put_on
from distrib.strategies.mirroring import assert_mirrored
from distrib.strategies.updating import update
from distrib.values import DistributedValues, IndexedSlices
from distrib.variables import (
    Storage,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    owner_of,
)


class StrategyExtended:
    """The four answers of a strategy, and the functions that only libraries call.

    Args:
      strategy: the strategy.
      devices: where replicas run, a device each.
      mesh: the same devices as a mesh; None for the default strategy.
      home: where variables live.
      engine: where replicas run.
      eager_engine: where they run under ``distrib.config.run_functions_eagerly(True)``.
      combiner: how values are combined.
      cross_device_ops: the algorithm by which they are added; None for one replica or none.
      can_shard_optimizer_state: whether ``experimental_shard_optimizer_state`` may be set.
    """

    def __init__(
        self,
        strategy: Any,
        *,
        devices: Sequence[Device],
        mesh: Mesh | None,
        home: VariableHome,
        engine: Engine,
        eager_engine: Runner | None = None,
        combiner: Combiner,
        cross_device_ops: CrossDeviceOps | None = None,
        can_shard_optimizer_state: bool = False,
    ):
        self._strategy = strategy
        self._devices = tuple(devices)
        self._home = home
        self.mesh = mesh
        self.engine = engine
        self.eager_engine: Runner = engine if eager_engine is None else eager_engine
        self.combiner = combiner
        self.cross_device_ops = cross_device_ops
        self._can_shard_optimizer_state = can_shard_optimizer_state
        self._shard_optimizer_state = False

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device strings of the replicas of this process."""
        return tuple(device_string(d) for d in self._devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device strings of the devices that hold variables."""
        return tuple(device_string(d) for d in self._home.devices)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether replicas must see equal shapes; False: uneven batches are allowed."""
        return False

    @property
    def experimental_shard_optimizer_state(self) -> bool:
        """Whether the optimizer state of new train states is split over the replicas.

        Set it before a ``TrainState`` is created. Each device then keeps one part of the optimizer
        state: gradients are reduce-scattered, each replica updates its part, and the parameters are
        all-gathered. The values are those of mirrored state; its memory is divided by the number of
        replicas, but for scalars, integers and keys, of which each has a copy. This is stage 1 of
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
        SC 2020, section 5.1.

        Raises:
          ValueError: when it is set to True on a strategy other than ``MirroredStrategy``.
        """
        return self._shard_optimizer_state

    @experimental_shard_optimizer_state.setter
    def experimental_shard_optimizer_state(self, value: bool) -> None:
        if value and not self._can_shard_optimizer_state:
            raise ValueError(
                "experimental_shard_optimizer_state has no effect under "
                f"{type(self._strategy).__name__}, which has one copy of every variable: use "
                "MirroredStrategy, or leave it False."
            )
        self._shard_optimizer_state = bool(value)

    # What variables ask.

    def create_storage(
        self,
        value: Any,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        name: str,
        *,
        optimizer_state: bool = False,
    ) -> Storage:
        """Make the place for the value of a new variable.

        Raises:
          ContextError: in the scope of another strategy.
        """
        self.check_scope()
        if optimizer_state and self._shard_optimizer_state:
            sharded = self._home.create_sharded_storage(value)
            if sharded is not None:
                return sharded
        return self._home.create_storage(value, synchronization, aggregation, name)

    def check_scope(self, variable: str | None = None) -> None:
        """Raise if another strategy is current.

        Args:
          variable: the name of the variable that is to be changed.

        Raises:
          ContextError: naming both strategies, and the variable.
        """
        require_same_strategy(self._strategy, variable)

    def lives_on(self, mesh: Mesh) -> bool:
        """Tell whether a program on ``mesh`` can take this strategy's variables as they are."""
        return self._home.lives_on(mesh)

    @property
    def variable_devices(self) -> tuple[Device, ...]:
        """The devices of the copies of a variable; none where JAX chooses."""
        return self._home.devices

    def device_of(self, variable: Variable) -> str:
        """Return the device string of the first copy of ``variable``."""
        return device_string(next(iter(variable.values[0].devices())))

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Tell whether ``v``, a variable or a copy of one, was made in this strategy's scope."""
        owner = self.value_container(v)
        if not isinstance(owner, Variable):
            raise VariableError(f"{v!r} is neither a distrib.Variable nor a copy of one.")
        return owner.distribute_strategy is self._strategy

    # What libraries ask.

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(copy, *args, **kwargs)`` for each copy of ``var``, on its device.

        Cross-replica context; in a replica the replicas meet for it, as in ``merge_call``. In a
        compiled step one traced call stands for all copies.

        Args:
          var: a variable of this strategy.
          fn: called with a copy, which it may read and assign to, ``lambda v, x: v.assign_sub(x)``
            for one, and with what belongs to that copy of each further argument.
          args: further arguments: distributed values, variables, and what is the same for all.
          kwargs: the same by name.
          group: whether to return distributed values, and not tuples.

        Returns:
          The tree that ``fn`` returned, with a distributed value in place of each array; if
          ``group`` is False, with a tuple of what the calls returned in its place. A constant that
          all calls return stands once.

        Raises:
          ContextError: if ``var`` belongs to another strategy, or another one is current.
          VariableError: if ``var`` is no variable.
        """
        if not isinstance(var, Variable):
            raise VariableError(f"You can not update `var` {var!r}. It must be a distrib.Variable.")
        if not self.variable_created_in_scope(var):
            raise ContextError(
                f"Variable {var.name!r} belongs to {var.distribute_strategy!r}, not to "
                f"{self._strategy!r}."
            )
        require_same_strategy(self._strategy, var.name)
        frame = current_frame()
        if frame.replica is not None and frame.program is not None:
            return frame.replica.merge_call(
                lambda _, *merged, **named: self.update(var, fn, merged, named, group),
                args,
                kwargs,
            )
        return update(var, fn, args, kwargs or {}, group, self._home.devices)

    def value_container(self, value: Any) -> Any:
        """Return the variable that ``value`` is a copy of; any other value as it is.

        Args:
          value: what ``update`` gave its function, or one of a variable's :attr:`values`.
        """
        owner = owner_of(value)
        return value if owner is None else owner

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Reduce ``value`` over the replicas, and put the result where ``destinations`` lives.

        Args:
          reduce_op: ``ReduceOp`` or its name.
          value: a pytree of per-replica values.
          destinations: a variable, for a copy where each of its copies is; a distributed value, for
            one on each replica; a device string; or an array, for its device.
          options: a :class:`distrib.experimental.CommunicationOptions`, or None.

        Returns:
          A pytree of :class:`distrib.Mirrored`; of arrays if it is for one device, and in a
          compiled step.

        Raises:
          ContextError: in replica context.
          ValueError: if ``destinations`` is none of these.
          DeviceError: if there is no such device.
        """
        self._require_cross_replica("reduce_to")
        devices = destination_devices(destinations, self._devices)
        reduced = self.reduce_tree(ReduceOp.parse(reduce_op), value, None, options)
        return jax.tree.map(lambda x: put_on(x, devices), reduced)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Reduce several values, each to its destination, as :meth:`reduce_to`.

        As in tf.distribute a value for one device is a :class:`distrib.Mirrored` here too, if
        variables have several copies: all of its copies are on that device.

        Args:
          reduce_op: ``ReduceOp`` or its name.
          value_destination_pairs: pairs of a value and a destination.
          options: a :class:`distrib.experimental.CommunicationOptions`, or None.

        Returns:
          A list of results in the order of the pairs.
        """
        self._require_cross_replica("batch_reduce_to")
        op = ReduceOp.parse(reduce_op)
        num_copies = len(self._home.devices)
        results = []
        for value, destinations in value_destination_pairs:
            devices = destination_devices(destinations, self._devices)
            if len(devices) == 1 < num_copies:
                devices *= num_copies
            reduced = self.reduce_tree(op, value, None, options)
            results.append(jax.tree.map(lambda x: put_on(x, devices), reduced))  # noqa: B023
        return results

    def _require_cross_replica(self, what: str) -> None:
        require_cross_replica_context(
            self._strategy, what, "use get_replica_context().merge_call()"
        )

    def reduce_tree(
        self, op: ReduceOp, tree: Any, axis: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce each value of a tree over the replicas."""
        return jax.tree.map(
            lambda leaf: self.combiner.reduce(op, leaf, axis, options),
            tree,
            is_leaf=_has_components,
        )

    def gather_tree(self, tree: Any, axis: int) -> Any:
        """Concatenate each value of a tree over the replicas."""
        return jax.tree.map(
            lambda leaf: self.combiner.gather(leaf, axis), tree, is_leaf=_has_components
        )

    def assert_mirrored(self, tree: Any) -> None:
        """Check that every copy of every value in ``tree`` is equal, bit by bit.

        Raises:
          NotMirroredError: naming the value, the devices and the largest difference.
        """
        assert_mirrored(tree)

    def compiled_text(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> str:
        """Return the program that ``run(fn, args, kwargs)`` runs, as XLA compiled it (HLO text)."""
        return self.engine.compiled_text(fn, args, kwargs)

    @ends_with_users_line
    def explain(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Explanation:
        """Describe what ``run(fn, args, kwargs)`` reads, writes, sends and compiles to.

        The step is compiled, and not run; ``run`` uses what has been compiled. It is the compiled
        step that is described under ``distrib.config.run_functions_eagerly(True)`` too.

        Returns:
          Plain data, which prints as tables.

        Raises:
          NestedTraceError: inside of a step or a JAX transformation.
          TypeError: under the default strategy, which compiles nothing.
        """
        return self.engine.explain(fn, args, kwargs)

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Create variables where ``colocate_with_variable`` lives, as this strategy does anyway.

        Raises:
          VariableError: if that variable belongs to another strategy.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise VariableError(
                "`colocate_vars_with` must only be passed a variable created in this strategy's "
                f"scope, not {colocate_with_variable.name!r} of "
                f"{colocate_with_variable.distribute_strategy!r}."
            )
        with self._strategy.scope():
            yield


def _has_components(leaf: Any) -> bool:
    return isinstance(leaf, DistributedValues | Variable | IndexedSlices) or is_sparse(leaf)
