"""Variables: made, read and assigned in and outside of replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import distrib
from distrib.platform import device_string
from tests.conformance.table import (
    Raises,
    case,
    context,
    mirrored,
    outcome,
    per_replica,
    plain,
    rid,
    values,
    variable,
)

Aggregation = distrib.VariableAggregation
Synchronization = distrib.VariableSynchronization
ON_READ = Synchronization.ON_READ


@case(
    "var-types",
    {
        "o": {
            "AUTO": "Variable",
            "NONE": Raises(ValueError, "`NONE` variable synchronization mode is not supported"),
            "ON_WRITE": "Variable",
            "ON_READ": "Variable",
        },
        "isvar": True,
        "isdv": False,
        "n": 2,
        "name": "w",
        "devices": ["device:CPU:0", "device:CPU:1"],
        "one": "Variable",
        "agg": "NONE",
        "sync": "ON_WRITE",
        "trainable": True,
        "onread_trainable": False,
        "onread_trainable_true": True,
    },
    differs={
        "o.AUTO": "there is one class of variables",
        "o.ON_WRITE": "there is one class of variables",
        "o.ON_READ": "there is one class of variables",
        "isdv": "a variable is a pytree of its value, a distributed value is a leaf",
        "name": "the :0 is that of a TensorFlow graph's output",
        "one": "there is one class of variables",
    },
    omits={"names": "the copies are arrays, which have no names"},
)
def var_types() -> Any:
    strategy = mirrored()
    v = variable(strategy, name="w")

    def on_read(**kwargs: Any) -> bool:
        made = variable(strategy, synchronization=ON_READ, aggregation=Aggregation.SUM, **kwargs)
        return made.trainable

    return {
        "o": {
            mode.name: outcome(
                lambda mode=mode: type(variable(strategy, synchronization=mode)).__name__
            )
            for mode in Synchronization
        },
        "isvar": isinstance(v, distrib.Variable),
        "isdv": isinstance(v, distrib.DistributedValues),
        "n": len(v.values),
        "name": v.name,
        "devices": [device_string(next(iter(x.devices()))).split("/")[-1] for x in v.values],
        "one": type(variable(distrib.OneDeviceStrategy("/cpu:0"))).__name__,
        "agg": v.aggregation.name,
        "sync": v.synchronization.name,
        "trainable": v.trainable,
        "onread_trainable": on_read(),
        "onread_trainable_true": on_read(trainable=True),
    }


@case(
    "var-assign-none-in-replica",
    {
        "assign": per_replica(0.0, 1.0),
        "add": per_replica(1.0, 2.0),
        "const": per_replica(1.0, 1.0),
        "after": [1.0, 1.0],
    },
)
def var_assign_none_in_replica() -> Any:
    strategy = mirrored()
    v = variable(strategy)
    return {
        "assign": outcome(lambda: strategy.run(lambda: v.assign(rid()))),
        "add": outcome(lambda: strategy.run(lambda: v.assign_add(1.0))),
        "const": outcome(lambda: strategy.run(lambda: v.assign(1.0))),
        "after": v.values,
    }


_CROSS = {
    "ret_type": "Mirrored",
    "assign": [4.0, 4.0],
    "add": [7.0, 7.0],
    "sub_noscope": [6.0, 6.0],
}


@case("var-assign-cross", {mode.name: _CROSS for mode in Aggregation})
def var_assign_cross() -> Any:
    strategy = mirrored()
    results = {}
    for mode in Aggregation:
        v = variable(strategy, aggregation=mode)
        with strategy.scope():
            returned = v.assign(4.0)
            assigned = v.values
            v.assign_add(3.0)
            added = v.values
        v.assign_sub(1.0)
        results[mode.name] = {
            "ret_type": type(returned).__name__,
            "assign": assigned,
            "add": added,
            "sub_noscope": v.values,
        }
    return results


ONE_FOR_ALL = Raises(
    ValueError, "A non-DistributedValues value 1.0 cannot be reduced .* ReduceOp.SUM"
)


@case(
    "var-assign-python-vs-tensor-sum",
    {
        "SUM_py": ONE_FOR_ALL,
        "SUM_tensor": [2.0, 2.0],
        "SUM_add_py": ONE_FOR_ALL,
        "MEAN_py": [1.0, 1.0],
        "MEAN_tensor": [1.0, 1.0],
        "MEAN_add_py": [11.0, 11.0],
        "ONLY_FIRST_REPLICA_py": [1.0, 1.0],
        "ONLY_FIRST_REPLICA_tensor": [1.0, 1.0],
        "ONLY_FIRST_REPLICA_add_py": [11.0, 11.0],
    },
)
def var_assign_python_vs_tensor_sum() -> Any:
    strategy = mirrored()
    results = {}

    def changed(mode: Aggregation, method: str, value: Any) -> Any:
        v = variable(strategy, aggregation=mode)
        strategy.run(lambda: getattr(v, method)(value()))
        return v.values

    for mode in (Aggregation.SUM, Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA):
        for what, method, value in (
            ("py", "assign", lambda: 1.0),
            ("tensor", "assign", lambda: jnp.float32(1)),
            ("add_py", "assign_add", lambda: 1.0),
        ):
            results[f"{mode.name}_{what}"] = outcome(
                lambda mode=mode, method=method, value=value: changed(mode, method, value)
            )
    return results


def _read(value: Any, plus: Any) -> dict[str, Any]:
    reads = dict.fromkeys(("scope", "noscope", "rv", "numpy", "value"), value)
    return reads | {"rep": per_replica(1.0, 2.0), "comps": [1.0, 2.0], "plus": plus}


NO_COMMON_VALUE = Raises(ValueError, "ON_READ with aggregation=NONE")


@case(
    "onread-read",
    {
        "NONE": _read(NO_COMMON_VALUE, NO_COMMON_VALUE),
        "SUM": _read(3.0, 4.0),
        "MEAN": _read(1.5, 2.5),
        "ONLY_FIRST_REPLICA": _read(1.0, 2.0),
    },
)
def onread_read() -> Any:
    strategy = mirrored()

    def reads(mode: Aggregation) -> dict[str, Any]:
        v = variable(strategy, 0.0, synchronization=ON_READ, aggregation=mode)
        strategy.run(lambda: v.assign(rid() + 1.0))
        with strategy.scope():
            in_scope = outcome(lambda: jnp.asarray(v))
        return {
            "scope": in_scope,
            "noscope": outcome(lambda: jnp.asarray(v)),
            "rv": outcome(v.read_value),
            "numpy": outcome(v.numpy),
            "value": outcome(v.value),
            "rep": strategy.run(v.value),
            "comps": v.values,
            "plus": outcome(lambda: v + 1.0),
        }

    return {mode.name: reads(mode) for mode in Aggregation}


@case(
    "onread-replica-updates",
    {
        "init": {"comps": [5.0, 5.0], "read": 10.0},
        "comps": [1.0, 3.0],
        "read": 4.0,
        "ret": "PerReplica",
    },
)
def onread_replica_updates() -> Any:
    strategy = mirrored()
    v = variable(strategy, 5.0, synchronization=ON_READ, aggregation=Aggregation.SUM)
    init = {"comps": v.values, "read": v.read_value()}
    strategy.run(lambda: v.assign(0.0))
    for _ in range(2):
        strategy.run(lambda: v.assign_add(rid() + 1.0))
    returned = strategy.run(lambda: v.assign_sub(jnp.float32(1)))
    return {"init": init, "comps": v.values, "read": v.read_value(), "ret": type(returned).__name__}


@case(
    "var-created-in-run",
    {
        "r": per_replica(1.0, 1.0),
        "kinds": ["Variable", "Variable"],
        "same": True,
        "n": [[1.0, 1.0]],
        "one_sided": per_replica(1.0, 2.0),
    },
    differs={
        "kinds.0": "there is one class of variables",
        "kinds.1": "there is one class of variables",
    },
    eager_only={
        "kinds": "a compiled step runs the Python of one replica",
        "same": "a compiled step runs the Python of one replica",
        "one_sided": "a compiled step has no branch on the replica id",
    },
)
def var_created_in_run() -> Any:
    strategy = mirrored()
    box: list[distrib.Variable] = []

    def step() -> Any:
        box.append(distrib.Variable(rid() + 1.0))
        return box[-1].value()

    def one_sided() -> Any:
        if int(context().replica_id_in_sync_group) == 0:
            return distrib.Variable(1.0).value()
        return jnp.float32(2)

    result = strategy.run(step)
    eager = distrib.config.functions_run_eagerly()
    return {
        "r": result,
        "kinds": [type(v).__name__ for v in box],
        "same": len(box) == 2 and box[0] is box[1],
        "n": [box[0].values],
        "one_sided": strategy.run(one_sided) if eager else None,
    }


NO_ROWS_OF_A_SUM = Raises(NotImplementedError, "scatter_max is only supported for .* NONE or")


@case(
    "onread-scatter",
    {
        "onread_cross": Raises(NotImplementedError, "ON_READ` doesn't support `scatter_add`"),
        "onread_replica": Raises(NotImplementedError, "ON_READ` doesn't support `scatter_add`"),
        "onwrite_NONE": [[11.0, 10.0], [12.0, 10.0]],
        "onwrite_max_NONE": [[20.0, 10.0], [21.0, 10.0]],
        "onwrite_cross_NONE": [[21.0, 10.0], [22.0, 10.0]],
        "onwrite_SUM": [[13.0, 10.0], [13.0, 10.0]],
        "onwrite_max_SUM": NO_ROWS_OF_A_SUM,
        "onwrite_cross_SUM": [[14.0, 10.0], [14.0, 10.0]],
        "onwrite_MEAN": [[11.5, 10.0], [11.5, 10.0]],
        "onwrite_max_MEAN": NO_ROWS_OF_A_SUM,
        "onwrite_cross_MEAN": [[12.5, 10.0], [12.5, 10.0]],
        "onwrite_ONLY_FIRST_REPLICA": [[11.0, 10.0], [11.0, 10.0]],
        "onwrite_max_ONLY_FIRST_REPLICA": [[20.0, 10.0], [20.0, 10.0]],
        "onwrite_cross_ONLY_FIRST_REPLICA": [[21.0, 10.0], [21.0, 10.0]],
    },
)
def onread_scatter() -> Any:
    strategy = mirrored()

    def row(x: Any) -> distrib.IndexedSlices:
        return distrib.IndexedSlices(jnp.reshape(x, 1), jnp.array([0]), (2,))

    v = variable(strategy, [0.0, 0.0], aggregation=Aggregation.SUM, synchronization=ON_READ)
    results = {
        "onread_cross": outcome(lambda: v.scatter_add(row(1.0))),
        "onread_replica": outcome(lambda: strategy.run(lambda: v.scatter_add(row(rid() + 1.0)))),
    }
    for mode in Aggregation:
        w = variable(strategy, [10.0, 10.0], aggregation=mode)

        def changed(change: Any, w: Any = w, inside: bool = True) -> Any:
            if inside:
                strategy.run(lambda: change(w))
            else:
                change(w)
            return w.values

        name = mode.name
        results |= {
            f"onwrite_{name}": changed(lambda x: x.scatter_add(row(rid() + 1.0))),
            f"onwrite_max_{name}": outcome(
                lambda changed=changed: changed(lambda x: x.scatter_max(row(rid() + 20.0)))
            ),
            f"onwrite_cross_{name}": changed(lambda x: x.scatter_add(row(1.0)), inside=False),
        }
    return results


@case(
    "var-initial-value-callable",
    {"calls": 2, "comps": [1.0, 1.0], "equal": True, "onread": [2.0, 2.0]},
)
def var_initial_value_callable() -> Any:
    strategy = mirrored()
    calls: list[int] = []

    def init() -> jax.Array:
        calls.append(1)
        return jnp.float32(len(calls))

    v = variable(strategy, init)
    w = variable(strategy, lambda: jax.random.uniform(jax.random.key(0)))
    u = variable(strategy, init, synchronization=ON_READ, aggregation=Aggregation.SUM)
    first, second = plain(w.values)
    return {"calls": len(calls), "comps": v.values, "equal": first == second, "onread": u.values}


@case(
    "var-enums",
    {
        "VariableAggregationV2": {"NONE": 0, "SUM": 1, "MEAN": 2, "ONLY_FIRST_REPLICA": 3},
        "VariableSynchronization": {"AUTO": 0, "NONE": 1, "ON_WRITE": 2, "ON_READ": 3},
        "ReduceOp": {"SUM": "SUM", "MEAN": "MEAN"},
        "InputReplicationMode": {"PER_WORKER": "PER_WORKER", "PER_REPLICA": "PER_REPLICA"},
        "CommunicationImplementation": {"AUTO": "AUTO", "RING": "RING", "NCCL": "NCCL"},
    },
)
def var_enums() -> Any:
    kinds = {
        "VariableAggregationV2": distrib.VariableAggregation,
        "VariableSynchronization": distrib.VariableSynchronization,
        "ReduceOp": distrib.ReduceOp,
        "InputReplicationMode": distrib.InputReplicationMode,
        "CommunicationImplementation": distrib.experimental.CommunicationImplementation,
    }
    return {name: {m.name: m.value for m in kind} for name, kind in kinds.items()}


@case("var-gradient", {"r": [per_replica(6.0, 12.0), per_replica(18.0, 18.0)], "v": [1.2, 1.2]})
def var_gradient() -> Any:
    strategy = mirrored()
    v = variable(strategy, 3.0, aggregation=Aggregation.MEAN)

    def step() -> Any:
        scale = rid() + 1.0
        gradient = jax.grad(lambda w: w * w * scale)(v.value())
        total = context().all_reduce("SUM", gradient)
        v.assign_sub(0.1 * total)
        return gradient, total

    result = strategy.run(step)
    return {"r": plain(result), "v": [round(float(x), 5) for x in v.values]}


@case(
    "scope-variable-creator",
    {
        "sv": True,
        "sw": False,
        "su": False,
        "coloc": Raises(
            ValueError, "`colocate_vars_with` must only be passed a variable created in"
        ),
        "run_other": per_replica(10.0, 10.0),
        "assign_other": Raises(RuntimeError, "Mixing different distrib.Strategy objects"),
    },
)
def scope_variable_creator() -> Any:
    ours, other = mirrored(), mirrored()
    v, w, u = variable(ours), variable(other), distrib.Variable(1.0)

    def colocated() -> Any:
        with ours.scope(), ours.extended.colocate_vars_with(w):
            return distrib.Variable(1.0)

    created = ours.extended.variable_created_in_scope
    return {
        "sv": created(v),
        "sw": created(w),
        "su": created(u),
        "coloc": outcome(colocated),
        "run_other": outcome(lambda: ours.run(w.value)),
        "assign_other": outcome(lambda: ours.run(lambda: w.assign(1.0))),
    }


@case(
    "update-group",
    {
        "group_ret": "Mirrored",
        "after": [15.0, 15.0],
        "nogroup_ret": "tuple",
        "nogroup_elt": "ArrayImpl",
        "after2": [20.0, 20.0],
        "perreplica": None,
        "after3": [21.0, 22.0],
        "d": [[21.0, 22.0], [7]],
    },
    differs={"nogroup_elt": "an assignment returns the new value as an array of JAX"},
)
def update_group() -> Any:
    strategy = mirrored()
    update = strategy.extended.update
    v = variable(strategy, 10.0)
    with strategy.scope():
        grouped = update(v, lambda w, x: w.assign_add(x), args=(5.0,), group=True)
        after = v.values
        apart = update(v, lambda w, x: w.assign_add(x), args=(5.0,), group=False)
        after2 = v.values
        x = values(strategy, lambda i: jnp.float32(i + 1))
        given = outcome(lambda: update(v, lambda w, y: w.assign_add(y), args=(x,)) and None)
        after3 = v.values
        read = update(v, lambda w: (w.read_value(), 7), group=False)
    return {
        "group_ret": type(grouped).__name__,
        "after": after,
        "nogroup_ret": type(apart).__name__,
        "nogroup_elt": type(apart[0]).__name__,
        "after2": after2,
        "perreplica": given,
        "after3": after3,
        "d": read,
    }


@case(
    "update-in-replica-context",
    {
        "a": [per_replica(1.0, 1.0), per_replica(2.0, 2.0)],
        "x": [1.0, 2.0],
        "b": per_replica(2.0, 4.0),
        "y": [2.0, 4.0],
    },
    differs={
        "a.0": "what is handed to every replica is a per-replica value, as all that a step returns",
        "a.1": "what is handed to every replica is a per-replica value, as all that a step returns",
    },
)
def update_in_replica_context() -> Any:
    strategy = mirrored()
    v = variable(strategy, 0.0)

    def updated(group: bool) -> Any:
        update = strategy.extended.update
        return update(v, lambda w, x: w.assign_add(x), args=(rid() + 1.0,), group=group)

    apart = outcome(lambda: strategy.run(lambda: updated(False)))
    x = v.values
    grouped = outcome(lambda: strategy.run(lambda: updated(True)))
    return {"a": apart, "x": x, "b": grouped, "y": v.values}


@case("onread-int-rounding", {"7": [3, 3], "-5": [-2, -2], "-7": [-3, -3], "1": [0, 0]})
def onread_int_rounding() -> Any:
    v = variable(mirrored(), 0, synchronization=ON_READ, aggregation=Aggregation.SUM)
    results = {}
    for total in (7, -5, -7, 1):
        v.assign(total)
        results[str(total)] = v.values
    return results


@case(
    "value-arithmetic",
    {
        "pr_plus": Raises(TypeError, "A PerReplica is one value for each replica"),
        "pr_conv": Raises(ValueError, "A PerReplica is one value for each replica"),
        "v_plus": 4.0,
        "v_float": 3.0,
        "v_bool": True,
        "pr_index": Raises(TypeError, "A PerReplica is one value for each replica"),
        "pr_repr": "PerReplica:{\n  0: Array(1., dtype=float32),\n  1: Array(2., dtype=float32)\n}",
        "v_repr": "<distrib.Variable 'Variable' shape=() dtype=float32 {0: 3.0,",
        "values_type": "tuple",
        "pr_len": Raises(TypeError, "A PerReplica is one value for each replica"),
    },
    differs={
        "v_float": "a variable converts as an array does",
        "pr_repr": "the components are arrays of JAX",
        "v_repr": "there is one class of variables, and its copies are arrays of JAX",
    },
)
def value_arithmetic() -> Any:
    strategy = mirrored()
    x = values(strategy, lambda i: jnp.float32(i + 1))
    v = variable(strategy, 3.0)
    return {
        "pr_plus": outcome(lambda: x + 1.0),
        "pr_conv": outcome(lambda: jnp.asarray(x)),
        "v_plus": v + 1.0,
        "v_float": float(v),
        "v_bool": bool(v > 2.0),
        "pr_index": outcome(lambda: x[0]),
        "pr_repr": repr(x)[:80],
        "v_repr": repr(v)[:60],
        "values_type": type(x.values).__name__,
        "pr_len": outcome(lambda: len(x)),
    }


@case(
    "var-mirrored-attrs",
    {
        "cross_device": "device:CPU:0",
        "wrong": Raises(ValueError, r"'w': Shape mismatch. The variable shape \(2,\), .* \(1,\)"),
        "shape": [2],
        "dtype": "float32",
        "value": [1.0, 2.0],
        "eq": [True, True],
    },
    omits={"rep": "one program serves every replica, so a device has no name in it"},
)
def var_mirrored_attrs() -> Any:
    v = variable(mirrored(), [1.0, 2.0], name="w")
    return {
        "cross_device": v.device.split("/")[-1],
        "wrong": outcome(lambda: v.assign([1.0])),
        "shape": v.shape,
        "dtype": v.dtype.name,
        "value": v.value(),
        "eq": v == v,  # noqa: PLR0124 - the comparison is by element.
    }


NO_INTEGER_MEAN = Raises(ValueError, "aggregation=MEAN and the non-floating dtype int32")


@case(
    "var-int-aggregation", {"SUM": [3, 3], "MEAN": NO_INTEGER_MEAN, "onread_MEAN": NO_INTEGER_MEAN}
)
def var_int_aggregation() -> Any:
    strategy = mirrored()
    v = variable(strategy, 0, aggregation=Aggregation.SUM)
    strategy.run(lambda: v.assign(context().replica_id_in_sync_group + 1))
    return {
        "SUM": v.values,
        "MEAN": outcome(lambda: variable(strategy, 0, aggregation=Aggregation.MEAN)),
        "onread_MEAN": outcome(
            lambda: variable(strategy, 0, aggregation=Aggregation.MEAN, synchronization=ON_READ)
        ),
    }
