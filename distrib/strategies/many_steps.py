"""Several steps in one call: where their batches come from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distrib.context import current_program
from distrib.engines import RunOptions, is_argument
from distrib.errors import ContextError, OutOfRangeError
from distrib.input import DistributedDataset, DistributedIterator
from distrib.platform import ends_with_users_line
from distrib.strategies.answers import Runner

Call = tuple[Sequence[Any], dict[str, Any]]


def run_with_options(
    engine: Runner,
    explain: Callable[..., Any],
    program: Any,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: RunOptions,
) -> Any:
    """Call ``fn`` once for each replica as ``options`` say.

    Args:
      engine: where replicas run.
      explain: describes the step of a call.
      program: the program that is current, if there is one.
      fn: the step.
      args: its arguments.
      kwargs: the same by name.
      options: what is asked for.

    Raises:
      TypeError: if ``options`` is no ``RunOptions``.
      ContextError: inside of a program, whose steps are a part of it.
    """
    if not isinstance(options, RunOptions):
        raise TypeError(
            f"run got options of type {type(options).__name__}: pass distrib.RunOptions(...)."
        )
    if program is not None:
        raise ContextError(
            f"run was given {options!r} inside of a distrib.function, where its step is a part of "
            "one program. Leave the options out, or call run outside of the function."
        )
    count = options.steps_per_call
    alone = count == 1 and not _iterators(_leaves((args, kwargs)))
    calls = [(args, kwargs)] if alone else drawn_calls(args, kwargs, count)
    if options.explain:
        first_args, first_kwargs = calls[0]
        print(explain(fn, first_args, first_kwargs))
    if alone:
        return engine.run(fn, args, kwargs, options)
    return engine.run_steps(fn, calls, options)


def drawn_calls(args: Sequence[Any], kwargs: dict[str, Any], count: int) -> list[Call]:
    """Return the arguments of each step, iterators replaced by the batches that they give.

    Args:
      args: the arguments of ``run``; an iterator of a distributed dataset in it is drawn from.
      kwargs: the same by name.
      count: the most steps.

    Returns:
      ``(args, kwargs)`` for each step, fewer than ``count`` where an iterator ends.

    Raises:
      OutOfRangeError: if an iterator is at its end.
      TypeError: if a dataset is given in place of an iterator.
    """
    leaves, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_input)
    for leaf in leaves:
        if isinstance(leaf, DistributedDataset):
            raise TypeError(
                f"Several steps in one call were given {leaf!r}, and each call would begin it "
                "anew: make an iterator once, iterator = iter(dataset), and give that."
            )
    iterators = _iterators(leaves)
    if not iterators:
        return [(args, kwargs)] * count
    first = dict.fromkeys(iterators)  # Each once, in order.
    if len(first) == 1:
        elements = [[element] for element in iterators[0].take(count)]
    else:
        elements = list(itertools.islice(zip(*first, strict=False), count))
    calls = []
    for drawn in elements:
        of = dict(zip(first, drawn, strict=True))
        filled = [of[x] if isinstance(x, DistributedIterator) else x for x in leaves]
        calls.append(jax.tree.unflatten(treedef, filled))
    if not calls:
        raise OutOfRangeError(
            f"{iterators[0]!r} is at its end: no step was run. Make an iterator for the next epoch "
            "with iter(dataset)."
        )
    return calls


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_input)


def _iterators(leaves: Sequence[Any]) -> list[DistributedIterator]:
    return [leaf for leaf in leaves if isinstance(leaf, DistributedIterator)]


def _is_input(leaf: Any) -> bool:
    return isinstance(leaf, DistributedDataset | DistributedIterator) or is_argument(leaf)


@ends_with_users_line
def train_loop(step: Callable[..., Any], iterator: DistributedIterator, steps: int) -> Any:
    """Run ``steps`` steps in one program, each with the next batch of ``iterator``.

    The steps run in a `jax.lax.scan`, so that small models do not wait for Python between them:
    it is ``strategy.run(step, args=(iterator,), options=RunOptions(steps_per_call=steps))``. The
    batches of all ``steps`` are on the devices at once. A shorter last batch runs in a program of
    its own, and another number of steps is another program. Cross-replica context; collective as
    ``run`` is. Under :class:`distrib.CentralStorageStrategy` each step is a call, because its
    variables leave their device for it.

    Args:
      step: called in replica context as ``step(batch)``, a tuple too as one argument. Define it
        once: a lambda that is made anew for each call is compiled for each.
      iterator: ``iter(dataset)`` of a distributed dataset; its strategy runs the steps.
      steps: the most steps, 1 or more.

    Returns:
      What the steps returned; of each array a per-replica value whose components are
      ``[steps, ...]``, with as many steps as there were batches.

    Raises:
      ContextError: inside of a :func:`distrib.function` or a step.
      OutOfRangeError: if the iterator is at its end.
      OutputError: if the steps return arrays of different shapes.
      Exception: what the input raises, before any step; the batches drawn by then are spent.
      TypeError: if ``iterator`` is not the iterator of a distributed dataset.
      ValueError: if ``steps`` is not a positive int.

    >>> import distrib
    >>> strategy = distrib.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     v = distrib.Variable(0.0, aggregation=distrib.VariableAggregation.SUM)
    >>> dataset = strategy.experimental_distribute_dataset(jax.numpy.arange(6.0), batch_size=2)
    >>> def step(x):
    ...     return v.assign_add(x.sum())
    >>> print(*train_loop(step, iter(dataset), 3).values)
    [ 1.  6. 15.] [ 1.  6. 15.]
    """
    if not isinstance(iterator, DistributedIterator):
        raise TypeError(
            f"train_loop was given a {type(iterator).__name__} to draw batches from: give it "
            "iter(strategy.experimental_distribute_dataset(...)), made once for an epoch."
        )
    if current_program() is not None:
        raise ContextError(
            "train_loop was called inside of a distrib.function or a step, which are programs of "
            "their own. Call it outside: it makes one program of its steps by itself."
        )
    options = RunOptions(steps_per_call=steps)
    return iterator.strategy.run(step, args=(iterator,), options=options)
