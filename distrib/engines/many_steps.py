"""Several steps in one call: the program that runs them, and their results as one.

A call of a compiled program costs Python and the runtime a fixed time, which a step of a small
model is shorter than. `jax.lax.scan` runs the steps one after the other inside of one program; the
variables go from step to step without leaving it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from distrib.engines.arguments import Arguments
from distrib.engines.lift import Lifted
from distrib.engines.lowering import Body
from distrib.engines.outputs import is_array, is_end
from distrib.errors import OutputError
from distrib.platform.mesh import split
from distrib.values import Layout, PerReplica


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps whose arguments one program can serve.

    Attributes:
      first: the arguments of the first step.
      columns: for each array leaf, what it is at each step.
      moving: for each, whether it is another one at each step.
    """

    first: Arguments
    columns: tuple[tuple[Any, ...], ...]
    moving: tuple[bool, ...]
    count: int

    @property
    def key(self) -> Any:
        """What of it the program depends on; None for a single step."""
        return None if self.count == 1 else (self.count, self.moving)

    @property
    def arrays(self) -> list[Any]:
        """The arrays that enter: those that stay, then the moving ones, each step by step."""
        columns = list(zip(self.columns, self.moving, strict=True))
        staying = [column[0] for column, moves in columns if not moves]
        return staying + [leaf for column, moves in columns if moves for leaf in column]

    def arranged(self, of_leaves: Sequence[Any]) -> list[Any]:
        """Bring what there is one of for each leaf into the order of :attr:`arrays`."""
        pairs = list(zip(of_leaves, self.moving, strict=True))
        staying = [x for x, moves in pairs if not moves]
        return staying + [x for x, moves in pairs if moves for _ in range(self.count)]


def stretches(calls: Sequence[Arguments], *, together: bool) -> list[Stretch]:
    """Cut steps into stretches of equal shapes.

    Args:
      calls: the arguments of each step.
      together: whether a program can serve several; even then, a step whose replicas see different
        shapes stands alone.
    """

    def key(step: tuple[int, Arguments]) -> Any:
        number, arguments = step
        return arguments.key if together and not arguments.are_uneven else number

    found = []
    for _, group in itertools.groupby(enumerate(calls), key=key):
        chosen = [arguments for _, arguments in group]
        columns = tuple(zip(*(arguments.arrays for arguments in chosen), strict=True))
        moving = tuple(any(leaf is not column[0] for leaf in column) for column in columns)
        found.append(Stretch(chosen[0], columns, moving, len(chosen)))
    return found


def _stacked(columns: Sequence[Sequence[Any]]) -> tuple[Any, Callable[[Any], Any]]:
    """Return the batches as one array with a leading axis of steps for each leaf."""
    return [jnp.stack(column) for column in columns], lambda rows: rows


def _by_index(columns: Sequence[Sequence[Any]]) -> tuple[Any, Callable[[Any], Any]]:
    """Return the numbers of the steps, and the function from a number to the batch.

    On CPU devices, stacking all batches costs more than to branch to the one that is wanted: each
    is copied once, while it is in the cache. Other devices would wait for the host to branch.
    """
    if not columns:
        return None, lambda _: ()
    branches = [lambda rows=rows: rows for rows in zip(*columns, strict=True)]
    return jnp.arange(len(branches)), lambda number: jax.lax.switch(number, branches)


def scanned(
    body: Body, lifted: Lifted, stretch: Stretch, num_replicas: int, *, on_cpu: bool
) -> Body:
    """Return the body of a program of several steps.

    Args:
      body: the body of one step.
      lifted: the step.
      stretch: the steps, which give the order of the arrays.
      num_replicas: how many replicas run the program.
      on_cpu: whether they run on CPU devices.

    Returns:
      A body whose outputs have a leading axis of steps, behind that of the replica.
    """
    written = [id(v) for v in lifted.writes]
    moving, count = stretch.moving, stretch.count
    num_staying = len(moving) - sum(moving)

    def steps(values: dict[int, Any], arrays: list, nnx: list) -> tuple[list, list, list]:
        staying, rest = arrays[:num_staying], arrays[num_staying:]
        columns = [rest[i : i + count] for i in range(0, len(rest), count)]
        batches, batch_of = _by_index(columns) if on_cpu else _stacked(columns)

        def one(carry: tuple[list, list], row: Any) -> tuple[tuple[list, list], list]:
            current, state = carry
            stays, moves = iter(staying), iter(batch_of(row))
            inputs = [next(moves) if m else next(stays) for m in moving]
            now = {**values, **dict(zip(written, current, strict=True))}
            outputs, changes, new = body(now, inputs, state)
            state = list(state)
            for position, change in zip(lifted.nnx_changes, changes, strict=True):
                state[position] = change
            return (new, state), outputs

        start = ([values[key] for key in written], list(nnx))
        (new, state), outputs = jax.lax.scan(one, start, batches, length=count)
        if num_replicas > 1:
            outputs = [jnp.swapaxes(x, 0, 1) for x in outputs]
        return outputs, [state[position] for position in lifted.nnx_changes], new

    return steps


def check_joinable(shapes: Sequence[Sequence[tuple[int, ...] | None]]) -> None:
    """Check that what the steps of a call return has one shape.

    Args:
      shapes: for each stretch, the shape of each output; None if it differs by replica.

    Raises:
      OutputError: if it has not.
    """
    for position, column in enumerate(itertools.zip_longest(*shapes)):
        if len(shapes) > 1 and (None in column or len(set(column)) > 1):
            raise OutputError(
                f"Output {position} of the step has the shapes {list(dict.fromkeys(column))} in "
                "the steps of one call, because the last batch is shorter: they cannot be joined. "
                "No step was run. Return sums or means, or leave the short batch out with "
                "drop_remainder=True."
            )


@contextlib.contextmanager
def after_steps(count: int) -> Iterator[None]:
    """Say with an error in the ``with`` block that ``count`` steps of its call stand."""
    try:
        yield
    except Exception as error:
        if count:
            error.add_note(f"distrib: steps of this call that were run before, and stand: {count}.")
        raise


def with_step_axis(tree: Any) -> Any:
    """Give what one step returned a leading axis of steps, of length 1."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica):
            if leaf.layout is Layout.STACKED and leaf.whole is not None:
                return PerReplica.stacked(_with_axis(leaf.whole))
            return PerReplica([jnp.asarray(part)[None] for part in leaf.values])
        return jnp.asarray(leaf)[None] if is_array(leaf) else leaf

    return jax.tree.map(one, tree, is_leaf=is_end)


@jax.jit
def _with_axis(whole: jax.Array) -> jax.Array:
    return whole[:, None]


def joined(trees: Sequence[Any]) -> Any:
    """Join what stretches of steps returned, each with a leading axis of steps.

    Raises:
      OutputError: if they returned trees of different structure.
    """
    if len(trees) == 1:
        return trees[0]
    structures = [jax.tree.structure(tree, is_leaf=is_end) for tree in trees]
    if any(structure != structures[0] for structure in structures):
        raise OutputError(
            f"The steps of one call returned {' and '.join(map(str, dict.fromkeys(structures)))}: "
            "they must return one structure."
        )
    return jax.tree.map(_joined, *trees, is_leaf=is_end)


def _joined(*leaves: Any) -> Any:
    first = leaves[0]
    if isinstance(first, PerReplica):
        wholes = [leaf.whole for leaf in leaves]
        if all(whole is not None and whole.sharding == wholes[0].sharding for whole in wholes):
            return PerReplica.stacked(_joiner(first.whole.sharding.mesh)(wholes))  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        columns = zip(*(leaf.values for leaf in leaves), strict=True)
        return PerReplica([_concatenated(parts) for parts in columns])
    return _concatenated(leaves) if is_array(first) else leaves[-1]


def _concatenated(parts: Sequence[Any]) -> jax.Array:
    shapes = list(dict.fromkeys(part.shape[1:] for part in parts))
    if len(shapes) > 1:
        raise OutputError(
            f"An array that the step returned has the shapes {shapes} in the steps of one call, "
            "because the last batch is shorter: they cannot be joined. The steps have been run. "
            "Return sums or means, or leave the short batch out with drop_remainder=True."
        )
    return jnp.concatenate(parts)


@functools.cache
def _joiner(mesh: Mesh) -> Callable[..., jax.Array]:
    return jax.jit(lambda wholes: jnp.concatenate(wholes, axis=1), out_shardings=split(mesh))
