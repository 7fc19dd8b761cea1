"""The input of a step: sources, splitting over replicas, loading ahead of use."""

from distrib.input.array_source import ArraySource
from distrib.input.distributed_dataset import (
    DistributedDataset,
    DistributedIterator,
    OptionalElement,
    datasets_from_function,
    distribute_dataset,
)
from distrib.input.iterable_source import IterableSource, OneShotSource
from distrib.input.options import InputContext, InputOptions, InputReplicationMode
from distrib.input.placing import BatchPlacer
from distrib.input.prefetch import Prefetcher
from distrib.input.sources import Source, as_source
from distrib.input.splitting import batch_size_of, piece_sizes, split_batch

__all__ = [
    "ArraySource",
    "BatchPlacer",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "IterableSource",
    "OneShotSource",
    "OptionalElement",
    "Prefetcher",
    "Source",
    "as_source",
    "batch_size_of",
    "datasets_from_function",
    "distribute_dataset",
    "piece_sizes",
    "split_batch",
]
