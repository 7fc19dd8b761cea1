"""The base of the objects that are made of variables: train states and metrics."""

from __future__ import annotations

from distrib.variables.variable import Variable


class HoldsVariables:
    """An object made of distributed variables.

    ``run`` takes and returns it by identity: its variables, not copies of their values, go into
    the step.
    """

    def distributed_variables(self) -> list[Variable]:
        """Return the variables that the object is made of."""
        return [value for value in vars(self).values() if isinstance(value, Variable)]
