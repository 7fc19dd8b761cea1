"""What is refused, and how it is said."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distrib
from tests.conformance.table import (
    Raises,
    case,
    context,
    mirrored,
    outcome,
    per_replica,
    scope_facts,
    variable,
)

CROSS_ONLY = "requires being in cross-replica context"


@case("run-nested-run", Raises(RuntimeError, rf"{CROSS_ONLY}.*get_replica_context\(\).merge_call"))
def run_nested_run() -> Any:
    strategy = mirrored()
    return outcome(lambda: strategy.run(lambda: strategy.run(lambda: jnp.float32(1))))


@case("scope-nested-same", {"same": True, "cross": True})
def scope_nested_same() -> Any:
    strategy = mirrored()
    with strategy.scope(), strategy.scope():
        facts = scope_facts(strategy)
    return {"same": facts["same"], "cross": facts["cross"]}


@case("scope-exit-wrong-order", {"e": None, "has": False})
def scope_exit_wrong_order() -> Any:
    strategy = mirrored()

    def crossed() -> None:
        first, second = strategy.scope(), strategy.scope()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)

    return {"e": outcome(crossed), "has": distrib.has_strategy()}


@case(
    "scope-run-of-other",
    Raises(RuntimeError, "Mixing different distrib.Strategy objects: .* is not "),
)
def scope_run_of_other() -> Any:
    ours, other = mirrored(), mirrored()
    with ours.scope():
        return outcome(lambda: other.run(lambda: jnp.float32(1)))


@case(
    "assert-wrong-context",
    {
        "reduce": Raises(RuntimeError, CROSS_ONLY),
        "gather": Raises(RuntimeError, rf"{CROSS_ONLY}.*get_replica_context\(\).all_gather"),
        "update": per_replica(2.0, 2.0),
        "reduce_to": Raises(RuntimeError, CROSS_ONLY),
        "distribute_dataset": 1,
        "values_from_function": per_replica(per_replica(1, 1), per_replica(1, 1)),
    },
    eager_only={"values_from_function": "a compiled step cannot return a value for each replica"},
)
def assert_wrong_context() -> Any:
    strategy = mirrored()
    v = variable(strategy, 1.0)

    def in_a_step(fn: Any) -> Any:
        return outcome(lambda: strategy.run(fn))

    def distribute() -> int:
        strategy.experimental_distribute_dataset(np.arange(4), batch_size=2)
        return 1

    def make() -> Any:
        return strategy.experimental_distribute_values_from_function(lambda c: 1)

    extended = strategy.extended
    return {
        "reduce": in_a_step(lambda: strategy.reduce("SUM", jnp.float32(1), None)),
        "gather": in_a_step(lambda: strategy.gather(jnp.array([1.0]), 0)),
        "update": in_a_step(lambda: extended.update(v, lambda w: w.assign(2.0))),
        "reduce_to": in_a_step(lambda: extended.reduce_to("SUM", jnp.float32(1), v)),
        "distribute_dataset": in_a_step(distribute),
        "values_from_function": in_a_step(make),
    }


@case(
    "run-exception-in-replica",
    {"err": Raises(ValueError, "^boom 1$"), "after": per_replica(2.0, 2.0), "cross_after": False},
    eagerly="a compiled step cannot raise in one replica",
)
def run_exception_in_replica() -> Any:
    strategy = mirrored()

    def step() -> Any:
        if context().replica_id_in_sync_group == 1:
            raise ValueError("boom 1")
        return jnp.float32(1)

    return {
        "err": outcome(lambda: strategy.run(step)),
        "after": strategy.run(lambda: jnp.float32(2)),
        "cross_after": distrib.in_cross_replica_context(),
    }


@case("values-from-function-graph", 1)
def values_from_function_graph() -> Any:
    make = mirrored().experimental_distribute_values_from_function
    return jax.jit(lambda: make(lambda c: jnp.int32(1)).values[0])()


CANNOT_MEET = Raises(RuntimeError, "merge_call was called inside a JAX transformation")


@case("merge-call-in-cond-error", CANNOT_MEET)
def merge_call_in_cond_error() -> Any:
    def step() -> Any:
        meet = context().merge_call
        return jax.lax.cond(
            jnp.float32(1) < 2.0, lambda: meet(lambda st: jnp.float32(1)), lambda: jnp.float32(0)
        )

    return outcome(lambda: mirrored().run(step))


@case(
    "merge-call-nested-tf-function",
    {"direct": per_replica(1.0, 1.0), "wrapped": CANNOT_MEET},
    differs={
        "direct": "what a step computes is a per-replica value, even where the replicas agree"
    },
)
def merge_call_nested_tf_function() -> Any:
    strategy = mirrored()

    @jax.jit
    def inner() -> Any:
        return context().merge_call(lambda st: jnp.float32(1))

    return {
        "direct": outcome(lambda: strategy.run(inner)),
        "wrapped": outcome(lambda: strategy.run(lambda: inner())),
    }


@case("merge-call-nested", Raises(RuntimeError, "merge_call.* was called inside a merge function"))
def merge_call_nested() -> Any:
    def step() -> Any:
        replica = context()
        return replica.merge_call(lambda st: replica.merge_call(lambda st2: 1.0))

    return outcome(lambda: mirrored().run(step))


RUN_IN_JIT = Raises(RuntimeError, "strategy.run was called inside a JAX transformation")


@case(
    "merge-call-function-in-function",
    {"direct": RUN_IN_JIT, "wrapped": RUN_IN_JIT},
    differs={"direct": "run compiles its function by itself, and cannot write variables under jit"},
)
def merge_call_function_in_function() -> Any:
    strategy = mirrored()

    @jax.jit
    def inner() -> Any:
        return context().merge_call(lambda st: jnp.float32(1))

    return {
        "direct": outcome(jax.jit(lambda: strategy.run(inner))),
        "wrapped": outcome(jax.jit(lambda: strategy.run(lambda: inner()))),
    }


@case(
    "var-invalid-aggregation",
    {
        "agg": Raises(ValueError, "Invalid variable aggregation mode: 'sum' for variable: None"),
        "sync": Raises(
            ValueError, "Invalid variable synchronization mode: 'bad' for variable: None"
        ),
        "none": Raises(ValueError, "`NONE` variable synchronization mode is not supported"),
        "agg_bad_outside": Raises(ValueError, "Invalid variable aggregation mode: 'sum'"),
        "one_none": "Variable",
    },
    differs={"one_none": "there is one class of variables"},
)
def var_invalid_aggregation() -> Any:
    strategy = mirrored()
    none = distrib.VariableSynchronization.NONE
    one = distrib.OneDeviceStrategy("/cpu:0")
    return {
        "agg": outcome(lambda: variable(strategy, aggregation="sum")),
        "sync": outcome(lambda: variable(strategy, synchronization="bad")),
        "none": outcome(lambda: variable(strategy, synchronization=none)),
        "agg_bad_outside": outcome(lambda: distrib.Variable(1.0, aggregation="sum")),
        "one_none": outcome(lambda: type(variable(one, synchronization=none)).__name__),
    }


_CPU = "/job:localhost/replica:0/task:0/device:CPU:"
_ALL = [[f"{_CPU}{i}" for i in range(8)], 8]


@case(
    "mirrored-construct",
    {
        "default": _ALL,
        "dup": Raises(ValueError, "CPU:0 is listed twice"),
        "empty": _ALL,
        "mix": Raises(ValueError, "There is no device 'GPU:0'"),
        "tup": [[f"{_CPU}0", f"{_CPU}1"], 2],
        "unknown": Raises(ValueError, "There is no device 'CPU:9'"),
        "string": Raises(
            ValueError, r"devices is 'CPU:0', and must be a list of devices: pass \['CPU:0'\]"
        ),
    },
    differs={
        "default.0": "the tests have eight devices, and the measurement had four",
        "default.1": "the tests have eight devices, and the measurement had four",
        "empty.0": "the tests have eight devices, and the measurement had four",
        "empty.1": "the tests have eight devices, and the measurement had four",
        "mix": "a device that does not exist is an error when the strategy is made",
        "unknown": "a device that does not exist is an error when the strategy is made",
    },
)
def mirrored_construct() -> Any:
    def made(*devices: Any) -> Any:
        def make() -> Any:
            strategy = distrib.MirroredStrategy(*devices)
            return [strategy.extended.worker_devices, strategy.num_replicas_in_sync]

        return outcome(make)

    return {
        "default": made(),
        "dup": made(["CPU:0", "CPU:0"]),
        "empty": made([]),
        "mix": made(["CPU:0", "GPU:0"]),
        "tup": made(("CPU:0", "CPU:1")),
        "unknown": made(["CPU:9"]),
        "string": made("CPU:0"),
    }


@case(
    "dataset-not-a-dataset",
    {
        "lst": Raises(ValueError, "rank 0|examples"),
        "fn": Raises(ValueError, "cannot be iterated for batches"),
    },
    differs={},
)
def dataset_not_a_dataset() -> Any:
    strategy = mirrored()
    return {
        # An iterable is a dataset here: that this one holds no batches shows when it is read.
        "lst": outcome(lambda: list(strategy.experimental_distribute_dataset([1, 2]))),
        # A list of numbers would be one example for each replica, so a number stands here.
        "fn": outcome(lambda: strategy.distribute_datasets_from_function(lambda c: 1)),
    }
