"""Variables that a step creates: one for all replicas, kept if the step gets to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from distrib.errors import ContextError, NestedTraceError
from distrib.variables import Variable


@contextlib.contextmanager
def kept_if_finished(created: Sequence[Variable]) -> Iterator[None]:
    """Abandon the variables in ``created`` if the ``with`` block raises."""
    try:
        yield
    except BaseException:
        for variable in created:
            variable.abandon()
        raise


def created_in_transformation(variable: Variable) -> NestedTraceError:
    """Return the error for a variable whose first value may not leave a transformation."""
    return NestedTraceError(
        f"Variable {variable.name!r} was created inside a JAX transformation (jax.grad, jax.jit, "
        "jax.vmap, lax.scan, lax.cond ...) in a step. Create it before, inside "
        "`with strategy.scope():`."
    )


def created_again(name: str) -> ContextError:
    """Return the error for a function that creates variables whenever it is traced."""
    return ContextError(
        f"Variable {name!r} was created inside strategy.run by a function that has created "
        "variables before. A step is compiled once and run many times: it may create its variables "
        "the first time it is called, and must keep them, `if self.v is None: self.v = "
        "distrib.Variable(...)`; or create them before, inside `with strategy.scope():`."
    )


def created_too_late(name: str, why: str) -> ContextError:
    """Return the error for a variable that this step cannot create."""
    return ContextError(
        f"Variable {name!r} was created inside strategy.run, {why}. Create it before, inside "
        "`with strategy.scope():`."
    )
