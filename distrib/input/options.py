"""How a dataset reaches the replicas, as the user says it, and what a dataset function is told."""

from __future__ import annotations

import dataclasses
import enum
import operator
from typing import Any, Literal

from distrib.errors import InputError


def checked_int(name: str, value: Any, *, minimum: int, fix: str) -> int:
    """Return ``value`` as an int of at least ``minimum``.

    Args:
      name: what the value is called in the message.
      value: what the user gave; NumPy integers pass, bools do not.
      minimum: the smallest value allowed.
      fix: what to pass instead, the last words of the message.

    Raises:
      InputError: if ``value`` is not an integer, or is less than ``minimum``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < minimum:
        raise InputError(f"{name} is {value!r}; it must be an int of at least {minimum}: {fix}")
    return number


class InputReplicationMode(enum.Enum):
    """How many input pipelines feed the replicas of one worker.

    ``PER_WORKER``: one pipeline a worker, from which its replicas draw in turn. ``PER_REPLICA``:
    one a replica, only with ``distribute_datasets_from_function``.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclasses.dataclass(frozen=True)
class InputContext:
    """What a dataset function is told of the pipeline that it builds.

    Args:
      num_input_pipelines: how many pipelines feed the step together.
      input_pipeline_id: which one this is, counted from 0; use both to shard the dataset.
      num_replicas_in_sync: how many replicas share one global batch.

    Raises:
      InputError: if a number is not an int in its range.

    >>> context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> print(context)
    distrib.InputContext(input pipeline id 1, total: 2)
    >>> context.get_per_replica_batch_size(32)
    8
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        """Check the three numbers, alone and against one another."""
        for name, minimum in (
            ("num_input_pipelines", 1),
            ("input_pipeline_id", 0),
            ("num_replicas_in_sync", 1),
        ):
            number = checked_int(
                name, getattr(self, name), minimum=minimum, fix=f"pass {minimum} or more."
            )
            object.__setattr__(self, name, number)
        if self.input_pipeline_id >= self.num_input_pipelines:
            raise InputError(
                f"input_pipeline_id is {self.input_pipeline_id}, but there are "
                f"{self.num_input_pipelines} pipelines, counted from 0: pass an id of at most "
                f"{self.num_input_pipelines - 1}."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica.

        Args:
          global_batch_size: examples in a step, over all replicas.

        Returns:
          ``global_batch_size // num_replicas_in_sync``.

        Raises:
          InputError: (a ValueError) if the division leaves a remainder.

        >>> InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(8)
        4
        """
        size = checked_int("global_batch_size", global_batch_size, minimum=1, fix="pass 1 or more.")
        replicas = self.num_replicas_in_sync
        if size % replicas:
            lower = size // replicas * replicas
            near = f"{lower} or {lower + replicas}" if lower else f"{replicas}"
            raise InputError(
                f"global_batch_size {size} is not divisible by num_replicas_in_sync {replicas}: "
                f"pass a multiple of {replicas}, such as {near}."
            )
        return size // replicas

    def __str__(self) -> str:
        """Return tf.distribute's short form."""
        return (
            f"distrib.InputContext(input pipeline id {self.input_pipeline_id}, total: "
            f"{self.num_input_pipelines})"
        )


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a distributed dataset moves its batches.

    Args:
      experimental_fetch_to_device: put each replica's piece on its device ahead of use. False
        leaves the pieces on the host, as NumPy arrays.
      experimental_replication_mode: an ``InputReplicationMode`` or its name.
      experimental_place_dataset_on_device: only False: see Raises.
      experimental_per_replica_buffer_size: how many batches wait, loaded and (with
        ``experimental_fetch_to_device``) on the device, beyond the one in use; each costs a replica
        the memory of its piece. 0 loads every batch when it is asked for, without a thread.
      last_batch: what becomes of a batch with fewer examples than the first, such as the last one
        of an epoch. ``"split"`` cuts it over the replicas all the same, as tf.distribute does, so
        that the last of them get fewer examples, or none. ``"drop"`` leaves it out. ``"pad"`` makes
        every element ``(batch, mask)``: each batch is filled up to the length of the first,
        rounded up to a multiple of the replicas, and ``mask [batch]``, of booleans, is True for its
        own examples, so that every step has the same shapes. Average with
        ``distrib.nn.masked_mean(losses, mask)``, and give metrics ``sample_weight=mask``. Of a
        dataset of arrays a whole batch has ``batch_size`` examples; with
        ``distribute_datasets_from_function`` batches are those of a replica.

    Raises:
      InputError: if a value has the wrong type or range, or asks for what cannot have an effect
        here: datasets are Python iterators, which run on the host.

    >>> InputOptions(experimental_replication_mode="per_replica").experimental_replication_mode
    <InputReplicationMode.PER_REPLICA: 'PER_REPLICA'>
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    last_batch: Literal["split", "drop", "pad"] = "split"

    def __post_init__(self) -> None:
        """Check each value and bring it to its declared type."""
        for name in ("experimental_fetch_to_device", "experimental_place_dataset_on_device"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(
                    f"{name} is {getattr(self, name)!r}; it must be a bool: pass True or False."
                )
        if self.experimental_place_dataset_on_device:
            raise InputError(
                "experimental_place_dataset_on_device is True, but a dataset here is a Python "
                "iterator and runs on the host; only its batches go to devices: leave it False, "
                "and raise experimental_per_replica_buffer_size to have more batches on the device "
                "ahead of use."
            )
        object.__setattr__(
            self, "experimental_replication_mode", _mode(self.experimental_replication_mode)
        )
        size = checked_int(
            "experimental_per_replica_buffer_size",
            self.experimental_per_replica_buffer_size,
            minimum=0,
            fix="pass the number of batches to load ahead of use, 0 for none.",
        )
        object.__setattr__(self, "experimental_per_replica_buffer_size", size)
        if self.last_batch not in ("split", "drop", "pad"):
            raise InputError(
                f'last_batch is {self.last_batch!r}; it must be "split", "drop" or "pad": pass '
                '"split" to cut a short batch over the replicas, "drop" to leave it out, "pad" to '
                "fill it up and get a mask."
            )


def _mode(mode: Any) -> InputReplicationMode:
    if isinstance(mode, InputReplicationMode):
        return mode
    if isinstance(mode, str) and mode.upper() in InputReplicationMode.__members__:
        return InputReplicationMode[mode.upper()]
    raise InputError(
        f"experimental_replication_mode is {mode!r}; it must be an InputReplicationMode: pass "
        "InputReplicationMode.PER_WORKER or InputReplicationMode.PER_REPLICA."
    )
