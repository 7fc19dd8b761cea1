"""The distributed variable: one value that lives where the strategy puts it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, cast

import jax
from jax import lax

from distrib.context import current_program, get_strategy, in_cross_replica_context
from distrib.errors import ContextError, MeetingError, NestedTraceError, UnsupportedError
from distrib.platform import under_jit, under_trace
from distrib.values import DistributedValues, Mirrored, is_distributed, is_slices
from distrib.variables.change import UNCOMBINED_SCATTERS
from distrib.variables.changeable import Changeable, as_array
from distrib.variables.component import remember_copies
from distrib.variables.storage import AbandonedStorage, Storage
from distrib.variables.synchronization import (
    VariableAggregation,
    VariableSynchronization,
    check_modes,
)

_serial = itertools.count()
# By serial number: a set would compare variables, which is by element.
_live: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()


class Variable(Changeable):
    """A value that steps read and change.

    Created inside ``strategy.scope()`` it lives where that strategy puts variables: a copy on each
    device under :class:`distrib.MirroredStrategy`, one array on the parameter device under
    :class:`distrib.CentralStorageStrategy`. It reads as an array: use it in arithmetic, index it,
    or call :meth:`value`. JAX's own functions want arrays: give them ``v.value()``. As a pytree it
    is its value, so that ``jax.grad(f)(v)`` and ``jax.jit(f)(v)`` work.

    Created inside ``strategy.run`` it is one variable, which starts from the value that replica 0
    gives it. A function that ``run`` compiles may create variables the first time it is called, and
    keep them: ``if self.v is None: self.v = distrib.Variable(...)``.

    Args:
      initial_value: an array, a number, or a function without arguments that returns one. It is
        copied. Text is kept in Python instead: no device holds it.
      trainable: whether optimizers should change it. By default True, and False for ``ON_READ``.
      dtype: the dtype; by default that of ``initial_value``.
      name: a name for messages.
      synchronization: when the copies are brought together.
      aggregation: how what the replicas assign (``ON_WRITE``), or hold (``ON_READ``), is combined.
      optimizer_state: whether it is state of an optimizer, which a strategy may split over its
        devices: see ``strategy.extended.experimental_shard_optimizer_state``.

    Raises:
      VariableError: if a mode is unknown, or does not fit the dtype (MEAN of integers, SUM of
        booleans) or the strategy, or for an initial value that is no array of numbers.

    >>> v = Variable([1.0, 2.0], name="v")
    >>> print(v.assign_add([1.0, 1.0]))
    [2. 3.]
    >>> print(jax.grad(lambda w: (w * w).sum())(v))
    [4. 6.]
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Variable:
        """Return a new variable; on replicas that run eagerly, what replica 0 made at this point.

        Python calls ``__init__`` on it in either case.
        """
        program = current_program()
        shared = None if program is None else program.created_before()
        return super().__new__(cls) if shared is None else shared

    def __init__(
        self,
        initial_value: Any | Callable[[], Any],
        trainable: bool | None = None,
        dtype: Any = None,
        name: str | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        *,
        optimizer_state: bool = False,
    ):
        if "storage" in vars(self):
            self._check_shared(name)
            return
        value = initial_value() if callable(initial_value) else initial_value
        if isinstance(value, Variable | Mirrored):
            value = value.value()
        # As an array of a definite dtype: a Python number would stay free to become any other.
        value = as_array(value, name, dtype)
        value = lax.convert_element_type(value, value.dtype)
        self._synchronization, self._aggregation, self._trainable = check_modes(
            synchronization, aggregation, trainable, value.dtype, name
        )
        self._name = "Variable" if name is None else name
        self._strategy = get_strategy()
        self._shape = value.shape
        self._dtype = value.dtype
        self._optimizer_state = optimizer_state
        self.serial = next(_serial)
        program = current_program()
        if program is None:
            self.storage: Storage = self._make_storage(value)
        else:
            self.storage = program.create(self, value, self._make_storage)
        _live[self.serial] = self

    def _make_storage(self, value: Any) -> Storage:
        return self._strategy.extended.create_storage(
            value,
            self._synchronization,
            self._aggregation,
            self._name,
            optimizer_state=self._optimizer_state,
        )

    def _check_shared(self, name: str | None) -> None:
        if name is not None and name != self._name:
            raise MeetingError(
                f"A replica creates variable {name!r} where replica 0 created {self._name!r}: the "
                "replicas must create the same variables in the same order, each of which is one "
                "variable of the strategy."
            )

    def abandon(self) -> None:
        """Leave a variable behind that was created in a step which failed before it had a value."""
        _live.pop(self.serial, None)
        self.storage = cast(Storage, AbandonedStorage(self._name))

    @property
    def name(self) -> str:
        """The name, for messages."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value, without any replica axis."""
        return self._shape

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return self._dtype

    @property
    def trainable(self) -> bool:
        """Whether optimizers should change it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the copies are brought together; never AUTO."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values are combined."""
        return self._aggregation

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope it was created."""
        return self._strategy

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The copies that this process holds, in the order of its replicas.

        Each is on its own device. They are snapshots: a later assignment does not change them.
        """
        copies = self.storage.components()
        remember_copies(self, copies)
        return copies

    @property
    def device(self) -> str:
        """The device string of the first copy."""
        return self._strategy.extended.device_of(self)

    def value(self) -> jax.Array:
        """Return the current value as an array of :attr:`shape` and :attr:`dtype`.

        In a replica: this replica's value, after what it assigned before. Outside: the first copy,
          or
        the aggregate of an ``ON_READ`` variable.

        Raises:
          VariableError: outside of a replica, for an ``ON_READ`` variable without aggregation.
          NestedTraceError: outside of a step, in a function that is traced for ``jax.jit``.
          ContextError: in the scope of another strategy, for an ``ON_READ`` variable.
        """
        program = current_program()
        if program is not None:
            return program.read(self)
        check_not_jitted(f"Variable {self._name!r}")
        if self.storage.per_replica:
            self._strategy.extended.check_scope(self._name)
        return self.storage.read()

    def change(self, kind: str, value: Any) -> Any:
        """Change the value, combined over the replicas in a replica; see :meth:`assign`."""
        program = current_program()
        if isinstance(value, Variable):
            value = value.value()
        if is_slices(value):
            self.check_scatter(kind)
        if program is not None:
            return program.assign(self, kind, value)
        if under_trace():
            raise NestedTraceError(
                f"Variable {self._name!r} was assigned inside a JAX transformation (jax.jit, "
                "jax.grad, lax.scan ...), whose values may not leave it. Return the new value and "
                "assign it outside, or use distrib.function in place of jax.jit."
            )
        if in_cross_replica_context():
            self._strategy.extended.check_scope(self._name)
        if is_slices(value) and is_distributed(value.values):
            update = self._strategy.extended.update
            return update(self, lambda copy, rows: copy.change(kind, rows), args=(value,))
        if not isinstance(value, DistributedValues):
            value = self.fitted(value)
        return self.storage.assign(value, kind)

    def check_scatter(self, kind: str) -> None:
        """Check that a scatter has a meaning for this variable.

        Raises:
          UnsupportedError: naming the variable and what it would need.
        """
        if self.storage.per_replica:
            raise UnsupportedError(
                f"Variables with `synchronization=ON_READ` doesn't support `{kind}`: each replica "
                f"has a copy of its own of {self._name!r}. Use ON_WRITE, or assign the whole value."
            )
        combining = self._aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        if combining and kind in UNCOMBINED_SCATTERS and self.storage.num_copies > 1:
            raise UnsupportedError(
                f"{kind} is only supported for variables with aggregation NONE or "
                f"ONLY_FIRST_REPLICA, and {self._name!r} has {self._aggregation.name}: the "
                "replicas' rows cannot be both combined and replace others. Give it another "
                "aggregation, or assign the whole value."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Return a new variable of the same strategy, with equal copies.

        Raises:
          ContextError: inside a step.
        """
        if current_program() is not None:
            raise ContextError(
                f"Variable {self._name!r} was copied inside strategy.run: copy it before."
            )
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.serial = next(_serial)
        components = self.values
        other.storage = self._make_storage(components[0])
        other.storage.put_components(components)
        _live[other.serial] = other
        return other

    def __repr__(self) -> str:
        head = f"<distrib.Variable {self._name!r} shape={self._shape} dtype={self._dtype}"
        if current_program() is not None:
            return f"{head} (inside a step)>"
        if isinstance(self.storage, AbandonedStorage):
            return f"{head} (without a value: the step that created it has failed)>"
        copies = ", ".join(f"{i}: {copy}" for i, copy in enumerate(self.values))
        return f"{head} {{{copies}}}>"


def check_not_jitted(what: str) -> None:
    """Check that what is read will not be kept as a constant by a jitted function.

    Args:
      what: what is read, for the message.

    Raises:
      NestedTraceError: in a function that is traced for ``jax.jit``.
    """
    if under_jit():
        raise NestedTraceError(
            f"{what} was read inside jax.jit, whose program would keep the value of now and give "
            "old numbers later. Pass the value to the jitted function, f(v.value(), x), or use "
            "distrib.function in place of jax.jit."
        )


def is_variable(value: Any) -> bool:
    """Tell whether ``value`` is a :class:`Variable`; a leaf test for tree functions.

    >>> jax.tree.map(lambda v: v.name, {"w": Variable(0.0, name="w")}, is_leaf=is_variable)
    {'w': 'w'}
    """
    return isinstance(value, Variable)


def live_variables(strategy: Any) -> list[Variable]:
    """Return the variables of ``strategy`` that somebody still holds, in the order of creation."""
    mine = [v for v in _live.values() if v.distribute_strategy is strategy]
    return sorted(mine, key=lambda v: v.serial)


# As a pytree a variable is its value: flattening reads it, and what comes back is an array.
jax.tree_util.register_pytree_node(
    Variable,
    lambda v: ((v.value(),), None),
    lambda _, children: children[0],  # pyright: ignore[reportArgumentType]
)
