"""The four questions that a strategy answers, as protocols.

Where variables live is a :class:`VariableHome`; where replicas run and updates are applied, an
:class:`Runner`; how values are combined, a :class:`Combiner`. A strategy picks one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax.sharding import Mesh

from distrib.collectives import CommunicationOptions
from distrib.engines import NO_OPTIONS, RunOptions
from distrib.platform import Device
from distrib.reduce_op import ReduceOp
from distrib.variables import Storage, VariableAggregation, VariableSynchronization


class VariableHome(Protocol):
    """Where variables live."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that hold variables."""
        ...

    def create_storage(
        self,
        value: Any,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        name: str,
    ) -> Storage:
        """Make the place for the value of one variable."""
        ...

    def create_sharded_storage(self, value: Any) -> Storage | None:
        """Make a place for a value that is split over the devices; None where it cannot be."""
        ...

    def lives_on(self, mesh: Mesh) -> bool:
        """Tell whether a program on ``mesh`` can take the arrays of variables as they are."""
        ...


class Runner(Protocol):
    """Where replicas run."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: RunOptions = NO_OPTIONS,
    ) -> Any:
        """Call ``fn`` once for each replica."""
        ...

    def run_steps(
        self,
        fn: Callable[..., Any],
        calls: Sequence[tuple[Sequence[Any], dict[str, Any]]],
        options: RunOptions,
    ) -> Any:
        """Call ``fn`` once for each replica and each ``(args, kwargs)``, one after the other."""
        ...


class Engine(Runner, Protocol):
    """Where replicas run, compiled."""

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` once, in cross-replica context."""
        ...

    def compiled_text(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> str:
        """Return the compiled program of a call."""
        ...

    def explain(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Describe the compiled program of a call."""
        ...


class Combiner(Protocol):
    """How the values of the replicas become one."""

    @property
    def num_replicas(self) -> int:
        """How many replicas there are, over all workers."""
        ...

    def reduce(
        self, op: ReduceOp, value: Any, axis: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce one value over the replicas, and over ``axis`` of the components if not None."""
        ...

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate one value over the replicas."""
        ...
