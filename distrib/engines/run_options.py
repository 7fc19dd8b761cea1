"""What a user may ask of one call to ``strategy.run``."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of ``strategy.run``.

    Args:
      experimental_enable_dynamic_batch_size: whether replicas may see batches of unequal sizes;
        False refuses them, for who would rather pad than compile another program.
      experimental_bucketizing_dynamic_shape: only False: see Raises.
      experimental_xla_options: options of XLA by name for the compilation of this step, as
        ``jax.jit(compiler_options=...)`` takes them; None for none.
      steps_per_call: how many steps one call runs, in one program (`jax.lax.scan`). Of an iterator
        of a distributed dataset among the arguments each step is given its next batch.
      explain: print what the step reads, writes, sends and compiles to, before it is run: what
        ``strategy.extended.explain`` returns, of one step.

    Raises:
      ValueError: if a value has the wrong type or range, or asks for what cannot have an effect
        here: shapes that differ are not padded to buckets but compiled for, each.

    >>> RunOptions(steps_per_call=10).steps_per_call
    10
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: dict[str, Any] | None = None
    steps_per_call: int = 1
    explain: bool = False

    def __post_init__(self) -> None:
        """Check each value."""
        for name in (
            "experimental_enable_dynamic_batch_size",
            "experimental_bucketizing_dynamic_shape",
            "explain",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, and must be True or False.")
        if self.experimental_bucketizing_dynamic_shape:
            raise ValueError(
                "experimental_bucketizing_dynamic_shape is True, but batches are not padded to "
                "buckets here: a step is compiled for each shape that it sees. Leave it False, and "
                "pad batches to few shapes where they are made."
            )
        options = self.experimental_xla_options
        if options is not None and not isinstance(options, dict):
            raise ValueError(
                f"experimental_xla_options is {options!r}, and must be a dict of XLA's options by "
                'name, such as {"xla_cpu_enable_fast_min_max": True}, or None.'
            )
        for name, value in (options or {}).items():
            if not isinstance(name, str) or not isinstance(value, bool | int | float | str):
                raise ValueError(
                    f"experimental_xla_options has the option {name!r} with the value {value!r}: a "
                    "name is text, and a value a bool, a number or text."
                )
        steps = self.steps_per_call
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps_per_call is {steps!r}, and must be an int of at least 1.")

    @property
    def key(self) -> Any:
        """What of the options decides which program serves a call."""
        options = self.experimental_xla_options
        return None if options is None else tuple(sorted(options.items()))


NO_OPTIONS = RunOptions()
"""The options of a call that is given none."""
