"""tf.distribute's strategy API on JAX: train on one device or many by changing one line."""

from distrib import config, errors, experimental, metrics, nn, random, train
from distrib.collectives import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
    ring_steps,
)
from distrib.context import (
    ReplicaContext,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from distrib.engines import RunOptions, function
from distrib.input import (
    DistributedDataset,
    DistributedIterator,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from distrib.platform import REPLICA_AXIS
from distrib.reduce_op import ReduceOp
from distrib.strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    StrategyExtended,
    experimental_set_strategy,
    train_loop,
)
from distrib.train import TrainState
from distrib.values import DistributedValues, IndexedSlices, Mirrored, PerReplica
from distrib.variables import Variable, VariableAggregation, VariableSynchronization, is_variable

__all__ = [
    "CentralStorageStrategy",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PerReplica",
    "REPLICA_AXIS",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RingAllReduce",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "TrainState",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "config",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "function",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_variable",
    "metrics",
    "nn",
    "random",
    "ring_steps",
    "train",
    "train_loop",
]
