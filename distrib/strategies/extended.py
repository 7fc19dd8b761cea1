"""``strategy.extended``: the parts that a strategy is composed of, and what is seldom needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from distrib.context import (
    current_program,
    require_cross_replica_context,
    require_same_strategy,
)
from distrib.errors import ContextError, VariableError
from distrib.platform import Device, device_string
from distrib.reduce_op import ReduceOp
from distrib.strategies.answers import Combiner, Engine, Runner, VariableHome
from distrib.strategies.mirroring import assert_mirrored
from distrib.values import DistributedValues
from distrib.variables import Storage, Variable, VariableAggregation, VariableSynchronization


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
        can_shard_optimizer_state: bool = False,
    ):
        self._strategy = strategy
        self._devices = tuple(devices)
        self._home = home
        self.mesh = mesh
        self.engine = engine
        self.eager_engine: Runner = engine if eager_engine is None else eager_engine
        self.combiner = combiner
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
          ContextError: inside a step, where a variable would be made anew at each compilation.
        """
        if current_program() is not None:
            raise ContextError(
                f"Variable {name!r} was created inside strategy.run. A step is compiled once and "
                "run many times: create its variables before, inside `with strategy.scope():`."
            )
        self.check_scope()
        if optimizer_state and self._shard_optimizer_state:
            sharded = self._home.create_sharded_storage(value)
            if sharded is not None:
                return sharded
        return self._home.create_storage(value, synchronization, aggregation, name)

    def check_scope(self) -> None:
        """Raise if another strategy is current.

        Raises:
          ContextError: naming both strategies.
        """
        require_same_strategy(self._strategy)

    def lives_on(self, mesh: Mesh) -> bool:
        """Tell whether a program on ``mesh`` can take this strategy's variables as they are."""
        return self._home.lives_on(mesh)

    def device_of(self, variable: Variable) -> str:
        """Return the device string of the first copy of ``variable``."""
        return device_string(next(iter(variable.values[0].devices())))

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Tell whether ``v`` was made in this strategy's scope."""
        return v.distribute_strategy is self._strategy

    # What libraries ask.

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)`` where all copies of ``var`` can be changed at once.

        Cross-replica context, for one in a merge function.

        Args:
          var: a variable of this strategy.
          fn: changes its first argument, ``lambda v, x: v.assign_sub(x)`` for one.
          args: further arguments; in a merge function per-replica values are given as the array of
            the replica.
          kwargs: the same by name.
          group: if False, return what ``fn`` returned as a tuple.

        Raises:
          ContextError: if ``var`` belongs to another strategy.
        """
        if not self.variable_created_in_scope(var):
            raise ContextError(
                f"Variable {var.name!r} belongs to {var.distribute_strategy!r}, not to "
                f"{self._strategy!r}."
            )
        result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Reduce ``value`` over the replicas.

        JAX moves a result to where it is used, so ``destinations`` only says for whom it is meant.

        Raises:
          ContextError: in replica context.
        """
        require_cross_replica_context(
            self._strategy, "reduce_to", "use get_replica_context().merge_call()"
        )
        return self.reduce_tree(ReduceOp.parse(reduce_op), value, None)

    def reduce_tree(self, op: ReduceOp, tree: Any, axis: Any) -> Any:
        """Reduce each value of a tree over the replicas."""
        return jax.tree.map(
            lambda leaf: self.combiner.reduce(op, leaf, axis), tree, is_leaf=_has_components
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
    return isinstance(leaf, DistributedValues | Variable)
