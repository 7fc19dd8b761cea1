"""The distributed variable: one value that lives where the strategy puts it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distrib.context import current_program, get_strategy, in_cross_replica_context
from distrib.errors import VariableError
from distrib.values import DistributedValues, Mirrored
from distrib.variables.arithmetic import ArrayOperators
from distrib.variables.storage import Storage
from distrib.variables.synchronization import (
    VariableAggregation,
    VariableSynchronization,
    check_modes,
)

_serial = itertools.count()
_live: weakref.WeakSet[Variable] = weakref.WeakSet()


class Variable(ArrayOperators):
    """A value that steps read and change.

    Created inside ``strategy.scope()`` it lives where that strategy puts variables: a copy on each
    device under :class:`distrib.MirroredStrategy`, one array on the parameter device under
    :class:`distrib.CentralStorageStrategy`. It reads as an array: use it in arithmetic, index it,
    or call :meth:`value`. JAX's own functions want arrays: give them ``v.value()``. As a pytree it
    is its value, so that ``jax.grad(f)(v)`` and ``jax.jit(f)(v)`` work.

    Args:
      initial_value: an array, a number, or a function without arguments that returns one. It is
        copied.
      trainable: whether optimizers should change it. By default True, and False for ``ON_READ``.
      dtype: the dtype; by default that of ``initial_value``.
      name: a name for messages.
      synchronization: when the copies are brought together.
      aggregation: how what the replicas assign (``ON_WRITE``), or hold (``ON_READ``), is combined.
      optimizer_state: whether it is state of an optimizer, which a strategy may split over its
        devices: see ``strategy.extended.experimental_shard_optimizer_state``.

    Raises:
      VariableError: if a mode is unknown, or does not fit the dtype or the strategy.

    >>> v = Variable([1.0, 2.0], name="v")
    >>> print(v.assign_add([1.0, 1.0]))
    [2. 3.]
    >>> print(jax.grad(lambda w: (w * w).sum())(v))
    [4. 6.]
    """

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
        value = initial_value() if callable(initial_value) else initial_value
        if isinstance(value, Variable | Mirrored):
            value = np.asarray(value)
        # As an array of a definite dtype: a Python number would stay free to become any other.
        value = jnp.asarray(value, dtype=dtype)
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
        self.storage: Storage = self._new_storage(value)
        _live.add(self)

    def _new_storage(self, value: Any) -> Storage:
        return self._strategy.extended.create_storage(
            value,
            self._synchronization,
            self._aggregation,
            self._name,
            optimizer_state=self._optimizer_state,
        )

    @property
    def name(self) -> str:
        """The name, for messages."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value, without any replica axis."""
        return self._shape

    @property
    def ndim(self) -> int:
        """The number of axes of the value."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return int(np.prod(self._shape, dtype=np.int64))

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
        return self.storage.components()

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
        """
        program = current_program()
        return self.storage.read() if program is None else program.read(self)

    def read_value(self) -> jax.Array:
        """Return the current value; the same as :meth:`value`."""
        return self.value()

    def numpy(self) -> np.ndarray:
        """Copy the value to the host."""
        return np.array(self.value())

    def assign(self, value: Any) -> Any:
        """Replace the value.

        In a replica, an ``ON_WRITE`` variable combines the replicas' values by :attr:`aggregation`
        first; an ``ON_READ`` one changes this replica's copy alone.

        Args:
          value: an array of :attr:`shape`, or a number for a scalar. Outside of a replica also a
            distributed value, whose components go to the copies.

        Returns:
          The new value: an array in a replica, a distributed value outside.

        Raises:
          VariableError: if shape or dtype do not fit.
          ContextError: inside the step of another strategy.
        """
        return self._change("assign", value)

    def assign_add(self, value: Any) -> Any:
        """Add ``value``; as :meth:`assign` otherwise."""
        return self._change("add", value)

    def assign_sub(self, value: Any) -> Any:
        """Subtract ``value``; as :meth:`assign` otherwise."""
        return self._change("sub", value)

    def _change(self, kind: str, value: Any) -> Any:
        program = current_program()
        if isinstance(value, Variable):
            value = value.value()
        if program is not None:
            return program.assign(self, kind, value)
        if in_cross_replica_context():
            self._strategy.extended.check_scope()
        if not isinstance(value, DistributedValues):
            value = self.fitted(value)
        return self.storage.assign(value, kind)

    def fitted(self, value: Any) -> jax.Array:
        """Return ``value`` as an array of this variable's shape and dtype.

        Raises:
          VariableError: if it does not fit; the message names both and the fix.
        """
        array = jnp.asarray(value)
        if array.shape != self._shape:
            raise VariableError(
                f"Cannot assign value to variable {self._name!r}: Shape mismatch. The variable "
                f"shape {self._shape}, and the assigned value shape {array.shape} are incompatible."
            )
        if array.dtype != self._dtype:
            weak = not hasattr(value, "dtype") or getattr(array, "weak_type", False)
            if not weak and jnp.promote_types(array.dtype, self._dtype) != self._dtype:
                raise VariableError(
                    f"Cannot assign value to variable {self._name!r}: its dtype is {self._dtype}, "
                    f"and the value's {array.dtype} would lose information. Convert it first: "
                    f"value.astype({str(self._dtype)!r})."
                )
            array = array.astype(self._dtype)
        return array

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Return a new variable of the same strategy, with equal copies."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.serial = next(_serial)
        components = self.values
        other.storage = other._new_storage(components[0])
        other.storage.put_components(components)
        _live.add(other)
        return other

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value(), dtype=dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def __repr__(self) -> str:
        head = f"<distrib.Variable {self._name!r} shape={self._shape} dtype={self._dtype}"
        if current_program() is not None:
            return f"{head} (inside a step)>"
        copies = ", ".join(f"{i}: {copy}" for i, copy in enumerate(self.values))
        return f"{head} {{{copies}}}>"


def is_variable(value: Any) -> bool:
    """Tell whether ``value`` is a :class:`Variable`; a leaf test for tree functions.

    >>> jax.tree.map(lambda v: v.name, {"w": Variable(0.0, name="w")}, is_leaf=is_variable)
    {'w': 'w'}
    """
    return isinstance(value, Variable)


def live_variables(strategy: Any) -> list[Variable]:
    """Return the variables of ``strategy`` that somebody still holds, in the order of creation."""
    mine = [v for v in _live if v.distribute_strategy is strategy]
    return sorted(mine, key=lambda v: v.serial)


# As a pytree a variable is its value: flattening reads it, and what comes back is an array.
jax.tree_util.register_pytree_node(
    Variable,
    lambda v: ((v.value(),), None),
    lambda _, children: children[0],  # pyright: ignore[reportArgumentType]
)
