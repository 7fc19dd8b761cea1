"""Datasets cut over replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

import distrib
from tests.conformance.table import (
    Raises,
    case,
    mirrored,
    outcome,
    per_replica,
    plain,
    values,
)


class Batches:
    """The batches of ``range(n)``, as often as they are asked for."""

    def __init__(self, n: int, size: int, dtype: Any = np.int32):
        self._numbers = np.arange(n, dtype=dtype)
        self._size = size

    def __iter__(self) -> Any:
        for start in range(0, len(self._numbers), self._size):
            yield self._numbers[start : start + self._size]


def pieces(strategy: distrib.Strategy, dataset: Iterable[Any]) -> list[Any]:
    """Return the components of each element."""
    return [plain(strategy.experimental_local_results(element)) for element in dataset]


@case(
    "values-from-function",
    {
        "t": per_replica([0, 2], [1, 2]),
        "py": per_replica(0, 1),
        "np": per_replica([0], [1]),
        "nested": {"a": per_replica(0, 1)},
        "one": False,
        "default": 1,
    },
    differs={"one": "the class of arrays is JAX's: asked is whether it is a distributed value"},
)
def values_from_function() -> Any:
    strategy = mirrored()
    one = distrib.OneDeviceStrategy("/cpu:0")
    made = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.array([c.replica_id_in_sync_group, c.num_replicas_in_sync])
    )
    return {
        "t": made,
        "py": values(strategy, lambda i: i),
        "np": values(strategy, lambda i: np.array([i])),
        "nested": values(strategy, lambda i: {"a": jnp.int32(i)}),
        "one": isinstance(values(one, lambda i: jnp.int32(1)), distrib.DistributedValues),
        "default": values(distrib.get_strategy(), lambda i: jnp.int32(1)),
    }


@case(
    "dataset-uneven-3-4",
    {
        "replicas 3 range(7).batch(7)": [[[0, 1, 2], [3, 4, 5], [6]]],
        "replicas 3 range(10).batch(4)": [
            [[0, 1], [2, 3], []],
            [[4, 5], [6, 7], []],
            [[8], [9], []],
        ],
        "replicas 3 range(10).batch(5)": [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8], [9]]],
        "replicas 3 range(5).batch(8)": [[[0, 1], [2, 3], [4]]],
        "replicas 3 range(9).batch(6)": [[[0, 1], [2, 3], [4, 5]], [[6], [7], [8]]],
        "replicas 3 range(2).batch(2)": [[[0], [1], []]],
        "replicas 4 range(7).batch(7)": [[[0, 1], [2, 3], [4, 5], [6]]],
        "replicas 4 range(10).batch(4)": [
            [[0], [1], [2], [3]],
            [[4], [5], [6], [7]],
            [[8], [9], [], []],
        ],
        "replicas 4 range(10).batch(5)": [[[0, 1], [2, 3], [4], []], [[5, 6], [7, 8], [9], []]],
        "replicas 4 range(5).batch(8)": [[[0, 1], [2, 3], [4], []]],
        "replicas 4 range(9).batch(6)": [[[0, 1], [2, 3], [4, 5], []], [[6], [7], [8], []]],
        "replicas 4 range(2).batch(2)": [[[0], [1], [], []]],
    },
)
def dataset_uneven_3_4() -> Any:
    results = {}
    for size in (3, 4):
        strategy = mirrored(size)
        for n, batch in ((7, 7), (10, 4), (10, 5), (5, 8), (9, 6), (2, 2)):
            dataset = strategy.experimental_distribute_dataset(Batches(n, batch))
            results[f"replicas {size} range({n}).batch({batch})"] = pieces(strategy, dataset)
    return results


@case(
    "dataset-reduce-uneven",
    {"sum": [6.0, 4.0], "mean0": [1.5, 4.0], "gather": [[0.0, 1.0, 2.0, 3.0], [4.0]]},
)
def dataset_reduce_uneven() -> Any:
    strategy = mirrored()
    sums, means, gathered = [], [], []
    for x in strategy.experimental_distribute_dataset(Batches(5, 4, np.float32)):
        sums.append(strategy.reduce("SUM", strategy.run(jnp.sum, args=(x,)), None))
        means.append(strategy.reduce("MEAN", x, axis=0))
        gathered.append(strategy.gather(x, 0))
    return {"sum": sums, "mean0": means, "gather": gathered}


@case(
    "dataset-mean-not-mean-of-means",
    {"pieces": [[1.0, 2.0, 3.0], [4.0, 100.0]], "mean_of_means": 27.0, "mean0": 22.0},
)
def dataset_mean_not_mean_of_means() -> Any:
    strategy = mirrored()
    numbers = np.array([1, 2, 3, 4, 100], np.float32)
    (x,) = strategy.experimental_distribute_dataset(numbers, batch_size=5)
    return {
        "pieces": strategy.experimental_local_results(x),
        "mean_of_means": strategy.reduce("MEAN", strategy.run(jnp.mean, args=(x,)), None),
        "mean0": strategy.reduce("MEAN", x, 0),
    }


@case(
    "dataset-empty-batch-mean",
    {"pieces": [[4.0], []], "shapes": [[1], [0]], "naive": "nan", "mean0": 4.0},
)
def dataset_empty_batch_mean() -> Any:
    strategy = mirrored()
    x = list(strategy.experimental_distribute_dataset(Batches(5, 4, np.float32)))[-1]
    return {
        "pieces": strategy.experimental_local_results(x),
        "shapes": [list(part.shape) for part in x.values],
        "naive": strategy.reduce("MEAN", strategy.run(jnp.mean, args=(x,)), None),
        "mean0": strategy.reduce("MEAN", x, 0),
    }


NO_LEN = Raises(TypeError, r"object of type 'DistributedDataset' has no len\(\)")


@case(
    "dataset-iterator",
    {
        "a": [[0, 1], [2, 3]],
        "stop": Raises(StopIteration, ""),
        "get_next": Raises(IndexError, "End of sequence"),
        "opt_after": False,
        "opt_err": Raises(IndexError, "The given optional does not have a value"),
        "o1": True,
        "v1": [[0, 1], [2, 3]],
        "o2": False,
        "again": 1,
        "length": NO_LEN,
        "card": Raises(AttributeError, "cardinality"),
        "types": ["DistributedDataset", "DistributedIterator"],
        "isdd": True,
        "isdi": True,
        "uneven_len": NO_LEN,
    },
    omits={"spec": "shape and dtype are JAX's"},
)
def dataset_iterator() -> Any:
    strategy = mirrored()
    dataset = strategy.experimental_distribute_dataset(Batches(4, 4))
    local = strategy.experimental_local_results
    first = iter(dataset)
    a = local(next(first))
    stop = outcome(lambda: next(first))
    get_next = outcome(first.get_next)
    after = first.get_next_as_optional()
    second = iter(dataset)
    optional = second.get_next_as_optional()
    o1, v1 = optional.has_value(), local(optional.get_value())
    return {
        "a": a,
        "stop": stop,
        "get_next": get_next,
        "opt_after": after.has_value(),
        "opt_err": outcome(after.get_value),
        "o1": o1,
        "v1": v1,
        "o2": second.get_next_as_optional().has_value(),
        "again": len(pieces(strategy, dataset)),
        "length": outcome(lambda: len(dataset)),
        "card": outcome(lambda: dataset.cardinality()),
        "types": [type(dataset).__name__, type(first).__name__],
        "isdd": isinstance(dataset, distrib.DistributedDataset),
        "isdi": isinstance(first, distrib.DistributedIterator),
        "uneven_len": outcome(lambda: len(strategy.experimental_distribute_dataset(Batches(5, 4)))),
    }


@case(
    "dataset-nested",
    {
        "m": [per_replica([0, 1], [2, 3]), {"y": per_replica([0, 10], [20, 30])}],
        "one": [[0, 1, 2, 3], {"y": [0, 10, 20, 30]}],
        "default": [[0, 1, 2, 3], {"y": [0, 10, 20, 30]}],
    },
    omits={"cls": "the default strategy distributes as the others do"},
)
def dataset_nested() -> Any:
    numbers = np.arange(4, dtype=np.int32)

    def only(strategy: distrib.Strategy) -> Any:
        (element,) = strategy.experimental_distribute_dataset(
            (numbers, {"y": numbers * 10}), batch_size=4
        )
        return plain(element)

    return {
        "m": only(mirrored()),
        "one": only(distrib.OneDeviceStrategy("CPU:0")),
        "default": only(distrib.get_strategy()),
    }


@case("dataset-in-function-loop", [10, 2])
def dataset_in_function_loop() -> Any:
    strategy = mirrored()
    total, steps = 0, 0
    for x in strategy.experimental_distribute_dataset(Batches(5, 4)):
        total += int(strategy.reduce("SUM", strategy.run(jnp.sum, args=(x,)), None))
        steps += 1
    return [total, steps]


@case(
    "datasets-from-function",
    {
        "steps": [[[0, 1], [2, 3]], [[4, 5], []]],
        "ctx": [
            {
                "num_input_pipelines": 1,
                "id": 0,
                "n": 2,
                "b8": 4,
                "s": "distrib.InputContext(input pipeline id 0, total: 1)",
            }
        ],
        "unbatched": [[0, 1]],
    },
    differs={"ctx.0.s": "the name of the package"},
)
def datasets_from_function() -> Any:
    strategy = mirrored()
    seen = []

    def dataset_fn(c: distrib.InputContext) -> Any:
        seen.append(
            {
                "num_input_pipelines": c.num_input_pipelines,
                "id": c.input_pipeline_id,
                "n": c.num_replicas_in_sync,
                "b8": c.get_per_replica_batch_size(8),
                "s": str(c),
            }
        )
        return Batches(6, 2)

    scalars = strategy.distribute_datasets_from_function(lambda c: list(np.arange(3)))
    return {
        "steps": pieces(strategy, strategy.distribute_datasets_from_function(dataset_fn)),
        "ctx": seen,
        "unbatched": pieces(strategy, scalars),
    }


@case(
    "input-options",
    {
        "defaults": ["True", "InputReplicationMode.PER_WORKER", "False", "1"],
        "fn": Raises(ValueError, "experimental_place_dataset_on_device is True"),
        "fn2": [[[0, 1], [0, 1]], [[2, 3], [2, 3]]],
        "ctx": [[2, 0, 2], [2, 1, 2]],
        "ds": Raises(
            ValueError, "PER_REPLICA is only supported in `distribute_datasets_from_function`"
        ),
        "nofetch": [[[0], [1]], [[2], [3]]],
    },
    differs={
        "fn": "a dataset is a Python iterator, which no device can run",
        "ctx": "one of the two calls raises before its function is called",
    },
    omits={"run": "run takes no options"},
)
def input_options() -> Any:
    strategy = mirrored()
    seen = []

    def dataset_fn(c: distrib.InputContext) -> Any:
        seen.append([c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync])
        return Batches(4, 2)

    def from_function(**options: Any) -> Any:
        mode = distrib.InputReplicationMode.PER_REPLICA
        options = distrib.InputOptions(experimental_replication_mode=mode, **options)
        dataset = strategy.distribute_datasets_from_function(dataset_fn, options)
        return pieces(strategy, dataset)

    def distributed(**options: Any) -> Any:
        dataset = strategy.experimental_distribute_dataset(
            Batches(4, 2), distrib.InputOptions(**options)
        )
        return pieces(strategy, dataset)

    options = distrib.InputOptions()
    return {
        "defaults": [
            str(options.experimental_fetch_to_device),
            str(options.experimental_replication_mode),
            str(options.experimental_place_dataset_on_device),
            str(options.experimental_per_replica_buffer_size),
        ],
        "fn": outcome(
            lambda: from_function(
                experimental_place_dataset_on_device=True, experimental_fetch_to_device=False
            )
        ),
        "fn2": from_function(),
        "ctx": seen,
        "ds": outcome(lambda: distributed(experimental_replication_mode="PER_REPLICA")),
        "nofetch": distributed(experimental_fetch_to_device=False),
    }


@case(
    "dataset-repeat-shuffle",
    {
        "batch_repeat": [[[0, 1], [2, 3]], [[4], [5]], [[0, 1], [2, 3]], [[4], [5]]],
        "repeat_batch": [[[0, 1], [2, 3]], [[4, 5], [0, 1]], [[2, 3], [4, 5]]],
        "mapped": [[[100, 101], [102, 103]], [[104], [105]]],
        "prefetch": [[[0], [1]], [[2], [3]], [[4], [5]]],
    },
    omits={"ragged": "tf.data", "group": "tf.data"},
)
def dataset_repeat_shuffle() -> Any:
    strategy = mirrored()

    def distributed(dataset: Any, **kwargs: Any) -> Any:
        return pieces(strategy, strategy.experimental_distribute_dataset(dataset, **kwargs))

    return {
        "batch_repeat": distributed([*Batches(6, 4), *Batches(6, 4)]),
        "repeat_batch": distributed(np.tile(np.arange(6), 2), batch_size=4),
        "mapped": distributed(batch + 100 for batch in Batches(6, 4)),
        "prefetch": distributed(Batches(6, 2)),
    }
