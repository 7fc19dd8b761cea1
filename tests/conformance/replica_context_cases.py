"""Which strategy and which replica is current, and how replicas meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
    plain,
    rid,
    scope_facts,
    variable,
)


@case(
    "ctx-default-strategy",
    {
        "has_strategy": False,
        "cls": "DefaultStrategy",
        "n": 1,
        "replica_context_is_none": False,
        "in_cross": False,
        "replica_id": 0,
        "ctx_n": 1,
        "same_object_twice": True,
    },
    differs={"cls": "the name of a private class"},
)
def ctx_default_strategy() -> Any:
    strategy = distrib.get_strategy()
    return {
        "has_strategy": distrib.has_strategy(),
        "cls": type(strategy).__name__,
        "n": strategy.num_replicas_in_sync,
        "replica_context_is_none": distrib.get_replica_context() is None,
        "in_cross": distrib.in_cross_replica_context(),
        "replica_id": context().replica_id_in_sync_group,
        "ctx_n": context().num_replicas_in_sync,
        "same_object_twice": distrib.get_strategy() is strategy,
    }


@case(
    "ctx-in-scope",
    {
        "inside": {"has": True, "same": True, "rc_none": True, "cross": True},
        "after": {"has": False, "same": False, "rc_none": False, "cross": False},
    },
)
def ctx_in_scope() -> Any:
    strategy = mirrored()
    with strategy.scope():
        inside = scope_facts(strategy)
    return {"inside": inside, "after": scope_facts(strategy)}


@case(
    "run-replica-id-in-function-static",
    {"r": per_replica(0, 1)},
    omits={"seen": "one program serves every replica, so the id has no static value"},
)
def run_replica_id_in_function_static() -> Any:
    return {"r": mirrored().run(lambda: context().replica_id_in_sync_group)}


@case(
    "set-strategy",
    {
        "a": {"has": True, "same": True, "cross": True},
        "b": {"has": False},
        "in_scope": Raises(RuntimeError, "Must not be called inside a strategy's scope"),
        "has": False,
    },
)
def set_strategy() -> Any:
    strategy = mirrored()
    distrib.experimental_set_strategy(strategy)
    try:
        facts = scope_facts(strategy)
    finally:
        distrib.experimental_set_strategy(None)
    after = {"has": distrib.has_strategy()}

    def in_scope() -> None:
        with strategy.scope():
            distrib.experimental_set_strategy(strategy)

    return {
        "a": {name: facts[name] for name in ("has", "same", "cross")},
        "b": after,
        "in_scope": outcome(in_scope),
        "has": distrib.has_strategy(),
    }


@case(
    "merge-call-basic",
    {
        "r": per_replica(3.0, 6.0),
        "seen": [
            {
                "same": True,
                "cross": True,
                "x": per_replica(1.0, 2.0),
                "k": per_replica(0.0, 1.0),
                "rc_none": True,
            }
        ],
    },
)
def merge_call_basic() -> Any:
    strategy = mirrored()
    seen: list[dict[str, Any]] = []

    def merge(current: Any, x: Any, k: Any = None) -> Any:
        facts = scope_facts(current)
        seen.append({name: facts[name] for name in ("cross", "rc_none")})
        seen[-1]["same"] = current is strategy and facts["same"]
        # Their numbers exist when the step runs, so they come out with its result.
        parts = [jnp.stack(value.values) for value in (x, k)]
        assert all(isinstance(value, distrib.PerReplica) for value in (x, k))
        return current.reduce("SUM", x, None), parts

    def step() -> Any:
        total, parts = context().merge_call(merge, args=(rid() + 1,), kwargs={"k": rid()})
        return total * (rid() + 1), parts

    result, parts = strategy.run(step)
    x, k = (plain(part.values[0]) for part in parts)
    return {
        "r": result,
        "seen": [entry | {"x": per_replica(*x), "k": per_replica(*k)} for entry in seen],
    }


@case("merge-call-returns-per-replica", [per_replica(0, 10), [5, "z"]])
def merge_call_returns_per_replica() -> Any:
    def step() -> Any:
        i = context().replica_id_in_sync_group
        same = context().merge_call(lambda st, x: x, args=(i * 10,))
        constant = context().merge_call(lambda st, x: (5, "z"), args=(i,))
        return same, constant

    return plain(mirrored().run(step))


@case(
    "all-reduce-basic",
    {
        "s": per_replica(3.0, 3.0),
        "m": per_replica(1.5, 1.5),
        "n": {
            "a": per_replica(3.0, 3.0),
            "b": [per_replica(30.0, 30.0), [per_replica(300.0, 300.0)]],
        },
        "single": [per_replica(3.0, 3.0)],
    },
)
def all_reduce_basic() -> Any:
    def step() -> Any:
        i = rid() + 1
        all_reduce = context().all_reduce
        return {
            "s": all_reduce(distrib.ReduceOp.SUM, i),
            "m": all_reduce("MEAN", i),
            "n": all_reduce("SUM", {"a": i, "b": [i * 10, [i * 100]]}),
            "single": all_reduce("SUM", [i]),
        }

    return mirrored().run(step)


@case(
    "all-reduce-gradient",
    {
        "SUM": {
            "y_times_x": per_replica(6.0, 6.0),
            "plain": per_replica(2.0, 2.0),
            "scaled_by_id1": per_replica(3.0, 3.0),
        },
        "MEAN": {
            "y_times_x": per_replica(3.0, 3.0),
            "plain": per_replica(1.0, 1.0),
            "scaled_by_id1": per_replica(1.5, 1.5),
        },
    },
)
def all_reduce_gradient() -> Any:
    def step(op: str) -> Any:
        i = rid() + 1
        all_reduce = context().all_reduce
        return {
            "y_times_x": jax.grad(lambda x: all_reduce(op, x) * x)(i),
            "plain": jax.grad(lambda x: all_reduce(op, x))(i),
            "scaled_by_id1": jax.grad(lambda x: all_reduce(op, x) * jax.lax.stop_gradient(x))(i),
        }

    strategy = mirrored()
    return {op: strategy.run(step, args=(op,)) for op in ("SUM", "MEAN")}


@case(
    "all-reduce-python",
    {
        "py": Raises(TypeError, r"all_reduce\(SUM\) got 2.0 of type float"),
        "pyi": Raises(TypeError, r"all_reduce\(SUM\) got 2 of type int"),
        "var": per_replica(6.0, 6.0),
        "intmean": per_replica(0.5, 0.5),
        "intmean_odd": per_replica(2.5, 2.5),
        "shapes": Raises(ValueError, r"float32\[2\], float32\[3\] to one all-reduce"),
        "default_sum": 4.0,
        "default_mean": 4.0,
    },
    eager_only={"shapes": "a shape that depends on the replica's id"},
)
def all_reduce_python() -> Any:
    strategy = mirrored()
    v = variable(strategy, 3.0)

    def reduced(op: str, value: Any) -> Any:
        return outcome(lambda: strategy.run(lambda: context().all_reduce(op, value())))

    return {
        "py": reduced("SUM", lambda: 2.0),
        "pyi": reduced("SUM", lambda: 2),
        "var": reduced("SUM", lambda: v),
        "intmean": reduced("MEAN", lambda: context().replica_id_in_sync_group),
        "intmean_odd": reduced("MEAN", lambda: context().replica_id_in_sync_group * 3 + 1),
        "shapes": reduced("SUM", lambda: jnp.ones([context().replica_id_in_sync_group + 2])),
        "default_sum": context().all_reduce("SUM", jnp.float32(4)),
        "default_mean": context().all_reduce("MEAN", jnp.float32(4)),
    }


_ROWS = [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
_COLUMNS = [[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]


@case(
    "all-gather-shapes",
    {
        "a0": per_replica(_ROWS, _ROWS),
        "a1": per_replica(_COLUMNS, _COLUMNS),
        "neg": per_replica(_COLUMNS, _COLUMNS),
        "mism": Raises(ValueError, r"float32\[1,1\], float32\[1,2\], which may differ along"),
        "rank": Raises(ValueError, r"float32\[1\], float32\[1,1\], which may differ along"),
        "scalar": Raises(ValueError, "has no such axis"),
        "nested": {
            "a": per_replica([1.0, 1.0], [1.0, 1.0]),
            "b": [per_replica([2.0, 2.0], [2.0, 2.0])],
        },
        "default": [4.0],
        "string": Raises(TypeError, "dtype <U1 at .*, which no device can hold"),
        "slices": Raises(NotImplementedError, "all_gather does not support IndexedSlices"),
    },
    differs={"neg": "an axis counted from the end is that axis"},
    eager_only=dict.fromkeys(
        ("a0", "a1", "neg", "mism", "rank"), "a shape that depends on the replica's id"
    ),
)
def all_gather_shapes() -> Any:
    strategy = mirrored()

    def gathered(value: Any) -> Any:
        return outcome(lambda: strategy.run(lambda: context().all_gather(value, 0)))

    def of_replica(shape: Callable[[int], list[int]], axis: int) -> Any:
        def step() -> Any:
            i = int(context().replica_id_in_sync_group)
            return context().all_gather(jnp.ones(shape(i)) * (i + 1.0), axis)

        return outcome(lambda: strategy.run(step))

    return {
        "a0": of_replica(lambda i: [i + 1, 2], 0),
        "a1": of_replica(lambda i: [2, i + 1], 1),
        "neg": of_replica(lambda i: [2, i + 1], -1),
        "mism": of_replica(lambda i: [1, i + 1], 0),
        "rank": of_replica(lambda i: [1] * (i + 1), 0),
        "scalar": gathered(jnp.float32(1)),
        "nested": gathered({"a": jnp.ones([1]), "b": [jnp.ones([1]) * 2.0]}),
        "default": context().all_gather(jnp.array([4.0]), 0),
        "string": gathered(np.array(["a"])),
        "slices": gathered({"a": distrib.IndexedSlices(jnp.ones([1]), jnp.array([0]), (2,))}),
    }


def _updates(first: float, second: float) -> dict[str, Any]:
    return {
        "ret": per_replica(first, first),
        "after_assign": [first, first],
        "ret_add": per_replica(second, second),
        "after_assign_add": [second, second],
        "after_assign_sub": [first, first],
    }


@case(
    "replica-ctx-update",
    {
        "SUM": _updates(3.0, 6.0),
        "MEAN": _updates(1.5, 3.0),
        "ONLY_FIRST_REPLICA": _updates(1.0, 2.0),
    },
)
def replica_ctx_update() -> Any:
    strategy = mirrored()
    results = {}
    for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        v = variable(strategy, 10.0, aggregation=distrib.VariableAggregation[name])
        result = {"ret": strategy.run(lambda v=v: v.assign(rid() + 1.0)), "after_assign": v.values}
        result["ret_add"] = strategy.run(lambda v=v: v.assign_add(rid() + 1.0))
        result["after_assign_add"] = v.values
        strategy.run(lambda v=v: v.assign_sub(rid() + 1.0))
        result["after_assign_sub"] = v.values
        results[name] = result
    return results


@case("strategy-thread-local", {"scope": [False, False, False], "set_strategy": [False, False]})
def strategy_thread_local() -> Any:
    strategy = mirrored()

    def asked_in_a_thread() -> list[bool]:
        answers: list[bool] = []

        def ask() -> None:
            facts = scope_facts(strategy)
            answers.extend(facts[name] for name in ("has", "same", "rc_none"))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return answers

    with strategy.scope():
        in_scope = asked_in_a_thread()
    distrib.experimental_set_strategy(strategy)
    try:
        when_set = asked_in_a_thread()
    finally:
        distrib.experimental_set_strategy(None)
    return {"scope": in_scope, "set_strategy": when_set[:2]}


@case(
    "all-reduce-indexed-slices",
    {
        "kind": ["IndexedSlices", "IndexedSlices"],
        "dense": per_replica([[1.0], [2.0]], [[1.0], [2.0]]),
    },
)
def all_reduce_indexed_slices() -> Any:
    strategy = mirrored()

    def step() -> Any:
        i = jnp.asarray(context().replica_id_in_sync_group)
        slices = distrib.IndexedSlices((rid() + 1.0).reshape(1, 1), i.reshape(1), (2, 1))
        total = context().all_reduce("SUM", slices)
        return total, total.to_dense()

    total, dense = strategy.run(step)
    parts = strategy.experimental_local_results((total,))
    return {"kind": [type(part[0]).__name__ for part in parts], "dense": dense}
