"""``distrib.function``: cross-replica code and the replicas that it runs, as one program."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from distrib.config import functions_run_eagerly
from distrib.context import current_program, default_frame, get_strategy, has_strategy
from distrib.engines.calls import unjitted
from distrib.engines.captures import Capture, found_strategies
from distrib.errors import ContextError
from distrib.platform import ends_with_users_line


class Function:
    """A function of cross-replica context that is compiled with the steps that it runs.

    Made by :func:`distrib.function`.

    Args:
      fn: the Python function.
    """

    def __init__(self, fn: Callable[..., Any]):
        self._fn = fn
        self._strategy: Any = None
        self._found_by: list[Capture] = []
        functools.update_wrapper(self, fn)

    @property
    def python_function(self) -> Callable[..., Any]:
        """The function as it was written."""
        return self._fn

    @ends_with_users_line
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, compiled for its arguments.

        Raises:
          ContextError: if it uses several strategies and is called outside of their scopes.
          TracedValueError: if Python code in it needs a value that exists only when it runs.
        """
        if current_program() is not None:
            return self._fn(*args, **kwargs)
        strategy = get_strategy() if has_strategy() else self._own_strategy(args, kwargs)
        if functions_run_eagerly():
            with strategy.scope():
                return self._fn(*args, **kwargs)
        return strategy.extended.engine.call(self._fn, args, kwargs)

    def _own_strategy(self, args: Any, kwargs: Any) -> Any:
        """Return the strategy that the function uses, by a name or through a variable."""
        if self._strategy is None or not all(capture.holds() for capture in self._found_by):
            found, captures = found_strategies(self._fn)
            others = [] if found else found_strategies(None, [*args, *kwargs.values()])[0]
            if len(found or others) > 1:
                names = " and ".join(sorted(map(repr, found or others)))
                raise ContextError(
                    f"{self._fn.__qualname__} uses {names}, and one program belongs to one "
                    "strategy. Call it inside `with strategy.scope():` of the one that is meant."
                )
            if others:
                return others[0]  # Of the arguments of this call; the next may be of another.
            self._strategy = found[0] if found else default_frame().strategy
            self._found_by = captures
        return self._strategy

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind the function to an instance, as a method."""
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<distrib.function {self._fn.__qualname__}>"


def python_function(fn: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Return the Python function that ``fn`` compiles, and whether it is one of a replica."""
    if isinstance(fn, Function):
        return fn.python_function, False
    return unjitted(fn), True


def function(fn: Callable[..., Any]) -> Function:
    """Compile cross-replica code and the steps that it runs into one program.

    ``strategy.run``, ``strategy.reduce``, assignments of variables and the Python between them
    become one compiled program, as under `tf.function`. Its variables are written back when it is
    over. Where ``run`` alone compiles a step, this also saves what lies between steps: a reduction
    of the losses, a second step, a loop over a few of them (which is unrolled; see
    :func:`distrib.train_loop` for many).

    As under ``jax.jit`` the Python code runs once for each structure, shape and dtype of the
    arguments. Arrays and numbers among them are traced; per-replica values are handed on to
    ``strategy.run``; booleans, strings and other objects are constants of the program. A batch has
    to be an argument: loop over a dataset outside of the function. Called in
    the scope of a strategy it is compiled for that one, else for the one that it uses. Under
    ``distrib.config.run_functions_eagerly(True)``, and for the default strategy, it is called as
    it is; inside of another such function, or of a step, it becomes part of that.

    Args:
      fn: a function of cross-replica context, or a method.

    Returns:
      The compiled function. It returns arrays for values of cross-replica context, and per-replica
      values for what ``strategy.run`` returned.

    >>> import distrib, jax
    >>> strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     total = distrib.Variable(0.0, aggregation=distrib.VariableAggregation.SUM)
    >>> @distrib.function
    ... def add_up(batch):
    ...     sums = strategy.run(lambda x: x.sum(), args=(batch,))
    ...     total.assign_add(strategy.reduce("SUM", sums, axis=None))
    ...     return total.value()
    >>> (batch,) = strategy.experimental_distribute_dataset([jax.numpy.arange(1.0, 5.0)])
    >>> print(add_up(batch), add_up(batch))
    10.0 20.0
    """
    return Function(fn)
