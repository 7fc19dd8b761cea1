"""``TrainState``: Flax's train state, made of distributed variables."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.serialization
import jax
import jax.numpy as jnp
import optax

from distrib.context import current_program, in_cross_replica_context
from distrib.platform import ends_with_users_line, leaves_with_paths
from distrib.random import replica_key
from distrib.reduce_op import ReduceOp
from distrib.train.accumulation import Accumulation, accumulator_trees, checked_steps
from distrib.train.error_feedback import RESIDUALS, combine, residuals_for
from distrib.train.fields import is_tree_of_arrays, taken_defaults
from distrib.train.precision import as_stored, checked_compute_dtype, rounded
from distrib.train.serialization import restore, saved
from distrib.values import is_slices
from distrib.variables import HoldsVariables, Variable, VariableAggregation, VariableTree


class TrainState(HoldsVariables):
    """Step, parameters, optimizer state and batch statistics of a model, as distributed variables.

    It has the fields and methods of ``flax.training.train_state.TrainState``, and differs in one
    thing: it is changed in place, so that it need not be passed into a step and out of it (though
    it may). Make it with :meth:`create`, inside ``strategy.scope()``.

    Inside a step its fields are arrays, and ``jax.grad`` can differentiate with respect to
    ``state.params``. Outside they are arrays too, snapshots with all of their copies.

    >>> import distrib
    >>> strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     state = TrainState.create(
    ...         apply_fn=lambda params, x: params["w"] * x, params={"w": 0.0}, tx=optax.sgd(0.1))
    >>> def train_step(x, y):
    ...     loss = lambda params: ((state.apply_fn(params, x) - y) ** 2).mean()
    ...     state.apply_gradients(grads=jax.grad(loss)(state.params))
    >>> data = (jnp.ones(4), jnp.array([1.0, 2.0, 3.0, 4.0]))
    >>> for batch in strategy.experimental_distribute_dataset(data, batch_size=4):
    ...     strategy.run(train_step, args=batch)
    >>> print(state.params["w"])
    0.5
    """

    field_defaults: ClassVar[dict[str, Any]] = {}
    """Extra fields that a subclass declares with a default, and the defaults."""

    def __init__(
        self,
        apply_fn: Callable[..., Any] | None,
        tx: optax.GradientTransformation,
        trees: dict[str, VariableTree],
        step: Variable,
    ):
        self._apply_fn = apply_fn
        self._tx = tx
        self._trees = trees
        self._step = step
        self._constants: dict[str, Any] = {}
        self._outside: Callable[..., Any] | None = None

    def __init_subclass__(cls, **kwargs: Any):
        """Take fields that a subclass declares, with or without a default, as extra fields."""
        super().__init_subclass__(**kwargs)
        cls.field_defaults = {**cls.field_defaults, **taken_defaults(cls)}

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any] | None,
        params: Any,
        tx: optax.GradientTransformation,
        batch_stats: Any = None,
        keys: Any = None,
        compute_dtype: Any = None,
        gradient_accumulation_steps: int | None = None,
        **extra: Any,
    ) -> TrainState:
        """Make a train state whose values live where the current strategy puts variables.

        Args:
          apply_fn: usually ``model.apply``.
          params: a pytree of arrays, copied.
          tx: an Optax optimizer.
          batch_stats: a pytree of running statistics; what the replicas assign is averaged.
          keys: PRNG keys by name, such as ``{"dropout": jax.random.key(0)}``.
          compute_dtype: the dtype, such as ``jnp.bfloat16``, in which steps see floating
            parameters. The copies that are kept, gradients as they are combined, the optimizer and
            batch statistics stay in the dtypes of ``params``. Steps cast their inputs as well
            (``x.astype(state.compute_dtype)``), or JAX promotes what it computes.
          gradient_accumulation_steps: update with the mean of the gradients of so many calls of
            :meth:`apply_gradients`, whose replicas communicate at the last of them only. The result
            is that of ``optax.MultiSteps``.
          **extra: further fields: pytrees of arrays become variables; None, text, functions and
            other constants are kept as they are.

        Raises:
          ValueError: if an extra field has the name of a method or of a field that there is, or
            ``gradient_accumulation_steps`` is below 1.
          TypeError: if ``compute_dtype`` is not a floating dtype.
        """
        fields = {**cls.field_defaults, **extra}
        given = {"batch_stats": batch_stats, "keys": keys}
        for name, value in given.items():
            default = fields.pop(name, None)
            given[name] = default if value is None else value
        for name in fields:
            if hasattr(cls, name) or name in ("params", "opt_state", "step", RESIDUALS):
                raise ValueError(
                    f"TrainState has a field {name!r} already: give the extra one another name."
                )
        mean = VariableAggregation.MEAN
        trees = {"params": VariableTree(params, "params", mean, trainable=True)}
        opt_state = tx.init(trees["params"].value())
        trees["opt_state"] = VariableTree(opt_state, "opt_state", optimizer_state=True)
        constants: dict[str, Any] = {}
        if compute_dtype is not None:
            constants["compute_dtype"] = checked_compute_dtype(compute_dtype)
        if gradient_accumulation_steps is not None:
            steps = checked_steps(gradient_accumulation_steps)
            constants["gradient_accumulation_steps"] = steps
            trees.update(accumulator_trees(trees["params"]))
        elif (residuals := residuals_for(trees["params"])) is not None:
            trees[RESIDUALS] = residuals
        for name, tree in {**given, **fields}.items():
            if is_tree_of_arrays(tree):
                trees[name] = VariableTree(tree, name)
            elif name not in given:
                constants[name] = tree
        step = Variable(
            0,
            dtype=jnp.int32,
            trainable=False,
            name="step",
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )
        state = cls(apply_fn, tx, trees, step)
        state._constants.update(constants)
        return state

    def distributed_variables(self) -> list[Variable]:
        """Return all variables: parameters, optimizer state, the other trees, and the step."""
        return [v for tree in self._trees.values() for v in tree.variables] + [self._step]

    @property
    def apply_fn(self) -> Callable[..., Any] | None:
        """What :meth:`create` was given, usually ``model.apply``."""
        return self._apply_fn

    @property
    def tx(self) -> optax.GradientTransformation:
        """The Optax optimizer."""
        return self._tx

    @property
    def step(self) -> jax.Array:
        """How often :meth:`apply_gradients` has been called; an ``int32`` scalar.

        With ``gradient_accumulation_steps`` too, as with ``optax.MultiSteps``: each of these calls
        has its own keys. The optimizer's own count is that of real updates.
        """
        return self._step.value()

    @property
    def params(self) -> Any:
        """The parameters; in a step, floating ones in :attr:`compute_dtype` if that is set."""
        params = self._trees["params"].value()
        if self.compute_dtype is None or current_program() is None:
            return params
        return rounded(params, self.compute_dtype)

    @property
    def compute_dtype(self) -> Any:
        """The dtype in which steps see floating parameters; None for their own."""
        return self._constants.get("compute_dtype")

    @property
    def gradient_accumulation_steps(self) -> int | None:
        """How many calls of :meth:`apply_gradients` make an update; None: each of them."""
        return self._constants.get("gradient_accumulation_steps")

    @property
    def opt_state(self) -> Any:
        """The optimizer's state."""
        return self._trees["opt_state"].value()

    @property
    def batch_stats(self) -> Any:
        """The running statistics of normalisation layers; None if there are none."""
        return self._trees["batch_stats"].value() if "batch_stats" in self._trees else None

    @property
    def keys(self) -> Any:
        """The PRNG keys of this replica at this step, by name; None if there are none.

        Step and replica are folded into the keys that :meth:`create` was given
        (:func:`distrib.random.replica_key`), so that a run that is resumed draws what an
        uninterrupted one would.
        """
        if "keys" not in self._trees:
            return None
        step = self.step
        tree = self._trees["keys"]
        folded = [replica_key(key, step) for key in jax.tree.leaves(tree.value())]
        return jax.tree.unflatten(tree.treedef, folded)

    def __getattr__(self, name: str) -> Any:
        trees, constants = self.__dict__.get("_trees", {}), self.__dict__.get("_constants", {})
        if name in trees:
            return trees[name].value()
        if name in constants:
            return constants[name]
        raise AttributeError(
            f"TrainState has no field {name!r}; its fields are step, apply_fn, tx, "
            f"{', '.join((*trees, *constants))}."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name in ("apply_fn", "tx", *self._fields()):
            raise AttributeError(
                f"TrainState.{name} cannot be set: compiled steps would go on with the old one. "
                "Change values with state.replace(...), a learning rate through opt_state "
                "(optax.inject_hyperparams); for another optimizer or function create a new state."
            )
        super().__setattr__(name, value)

    def _fields(self) -> list[str]:
        return ["step", *self.__dict__.get("_trees", {}), *self.__dict__.get("_constants", {})]

    @ends_with_users_line
    def apply_gradients(
        self, *, grads: Any, aggregation: ReduceOp | str | None = "MEAN", **changes: Any
    ) -> TrainState:
        """Combine gradients over the replicas, apply the optimizer once, and count the step.

        The optimizer sees the global gradient, so clipping and norms are those of one device. With
        ``gradient_accumulation_steps`` it sees the mean of so many of them, at the last.

        Args:
          grads: a pytree like ``params``. A leaf may be an :class:`distrib.IndexedSlices`, the
            gradient of some rows of an embedding: the replicas exchange its rows, and the optimizer
            sees the whole array, with zeros in the others.
          aggregation: the name, or a ``ReduceOp``: ``"MEAN"``, each replica weighted by its
            examples, for a loss that is a mean over the examples of the replica; ``"SUM"`` for a
            loss divided by the global batch; None for gradients that have been combined already.
            Outside of a step there is nothing to combine.
          **changes: fields to :meth:`replace` as well, ``batch_stats=`` for one.

        Returns:
          The state itself.

        Raises:
          VariableError: if ``grads`` has another structure or other shapes than ``params``.
          ValueError: if ``aggregation`` is none of these.
        """
        aggregation = _aggregation_name(aggregation)
        params, opt_state = self._trees["params"], self._trees["opt_state"]
        operand = params.flatten(grads)
        steps = self.gradient_accumulation_steps
        in_parts = any(v.storage.shards is not None for v in opt_state.variables)
        if in_parts or steps is not None or self.compute_dtype is not None:
            operand = [_dense(leaf) for leaf in operand]
        if self.compute_dtype is not None:
            operand = as_stored(operand, params.variables)
        program = current_program()
        variables = [*params.variables, *opt_state.variables, self._step]
        apply = functools.partial(_optimized, self.tx, params, opt_state)
        if steps is not None:
            accumulation = Accumulation(self._trees, steps, variables, apply)
            operand = accumulation.operand(operand, aggregation)
            variables, apply = accumulation.variables, accumulation.apply
        elif program is not None and aggregation is not None and not in_cross_replica_context():
            named = leaves_with_paths({"gradients": grads}, is_leaf=is_slices)
            names = [path for path, _ in named]
            residuals = self._trees.get(RESIDUALS)
            if residuals is None:
                operand = program.by_examples.combine(
                    operand, aggregation, names, in_parts=in_parts
                )
            else:
                operand = combine(program, params, residuals, operand, aggregation, names)
        operand = [_dense(leaf) for leaf in operand]
        if program is None:
            olds = [v.storage.whole() for v in variables]
            news = self._jitted(apply)(olds, operand)
            for variable, new in zip(variables, news, strict=True):
                variable.assign(new)
        else:
            program.update(variables, apply, operand)
        return self.replace(**changes)

    def _jitted(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``apply`` compiled, for updates outside of a step; compiled once."""
        if self._outside is None:
            self._outside = jax.jit(apply)
        return self._outside

    @ends_with_users_line
    def replace(self, **changes: Any) -> TrainState:
        """Assign whole fields; in a replica, floating values are averaged over the replicas.

        Args:
          **changes: ``params``, ``opt_state``, ``batch_stats``, ``step`` or an extra field, each
            with a value of the structure that it has; ``apply_fn`` outside of a step.

        Returns:
          The state itself.

        Raises:
          AttributeError: if there is no such field.
          VariableError: if a value does not fit.
        """
        for name, value in changes.items():
            if name == "step":
                self._step.assign(value)
            elif name in self._trees and name != "keys":
                self._trees[name].assign(value)
            else:
                fields = [name for name in self._trees if name != "keys"]
                raise AttributeError(
                    f"TrainState.replace cannot change {name!r} here; it can change step, "
                    f"{', '.join(fields)}."
                )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainState:
        """Return a state with variables of its own, which further steps do not change."""
        trees = {name: copy.deepcopy(tree, memo) for name, tree in self._trees.items()}
        state = type(self)(self.apply_fn, self.tx, trees, copy.deepcopy(self._step, memo))
        managed = state.__dict__.keys()
        state.__dict__["_constants"].update(self._constants)
        state.__dict__.update(
            {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in managed}
        )
        return state

    def __repr__(self) -> str:
        count = sum(v.size for v in self._trees["params"].variables)
        return f"<distrib.TrainState with {count:,} parameters: {', '.join(self._trees)}>"


def _aggregation_name(aggregation: Any) -> str | None:
    """Return "MEAN", "SUM" or None.

    Raises:
      ValueError: if ``aggregation`` names something else.
    """
    name = getattr(aggregation, "name", aggregation)
    name = name.upper() if isinstance(name, str) else name
    if name not in ("MEAN", "SUM", "NONE", None):
        raise ValueError(f"aggregation is {aggregation!r}, and must be 'MEAN', 'SUM' or None.")
    return None if name == "NONE" else name


def _dense(gradient: Any) -> Any:
    return gradient.to_dense() if is_slices(gradient) else gradient


def _optimized(
    tx: optax.GradientTransformation,
    params: VariableTree,
    opt_state: VariableTree,
    olds: list[Any],
    grads: list[Any],
) -> list[Any]:
    """Return the new parameters, optimizer state and step."""
    count = len(params.variables)
    old_params = params.build(olds[:count])
    updates, new_state = tx.update(params.build(grads), opt_state.build(olds[count:-1]), old_params)
    new_params = optax.apply_updates(old_params, updates)
    return [*params.flatten(new_params), *opt_state.flatten(new_state), olds[-1] + 1]


def _to_state_dict(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, **saved(state._trees)}  # noqa: SLF001 - same module


def _from_state_dict(state: TrainState, fields: dict[str, Any]) -> TrainState:
    restore(state._trees, state._step, fields)  # noqa: SLF001 - same module
    return state


# Flax's own functions save and restore a state: to_bytes, msgpack_restore, from_state_dict.
flax.serialization.register_serialization_state(TrainState, _to_state_dict, _from_state_dict)
