"""``run``: find or make the program of a call, and run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from distrib.collectives import CrossDeviceOps
from distrib.engines import uneven
from distrib.engines.cache import CompileCache
from distrib.engines.calls import check_components, check_outside_trace, unjitted
from distrib.engines.creation import created_again, created_too_late, kept_if_finished
from distrib.engines.lift import Call, lift
from distrib.engines.nnx_objects import NnxState, is_nnx_object, take_apart, write_back
from distrib.engines.placement import UpdatePlacement
from distrib.engines.signature import Kind, is_leaf, leaf_key, traced_form
from distrib.engines.spmd import Step, entering_leaf, even_body, even_finish


class SpmdEngine:
    """Runs the steps of one strategy.

    Args:
      strategy: the strategy, which replica contexts show to the user.
      mesh: a replica on each of its devices.
      ops: how values are added over the replicas.
      placement: where variables live and updates are applied.
      device: what a replica context gives as its device.
    """

    def __init__(
        self,
        strategy: Any,
        mesh: Mesh,
        ops: CrossDeviceOps,
        placement: UpdatePlacement,
        device: str,
    ):
        self._strategy = strategy
        self._mesh = mesh
        self._ops = ops
        self._placement = placement
        self._device = device
        self._cache = CompileCache()

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` once for each replica, in one compiled program.

        Raises:
          NestedTraceError: inside of a JAX transformation.
        """
        check_outside_trace()
        fn = unjitted(fn)
        leaves, treedef, nnx_state = _flattened(args, kwargs)
        signature, step = self._step(fn, treedef, leaves, nnx_state)
        arrays = [
            leaf
            for leaf, (kind, _) in zip(leaves, signature[1], strict=True)
            if kind is not Kind.OBJECT
        ]
        if step.created:
            return self._run_first(fn, step, arrays, nnx_state)
        if nnx_state is None:
            return step(arrays)[0]
        result, changes = step(arrays, nnx_state.arrays)
        write_back(nnx_state, changes)
        return result

    def _run_first(
        self, fn: Callable[..., Any], step: Step, arrays: list[Any], state: NnxState | None
    ) -> Any:
        """Run a step that creates variables. The next call is traced anew, with these variables.

        Raises:
          ContextError: if the function has created variables before.
        """
        with kept_if_finished(step.created):
            if self._cache.has_created(fn):
                raise created_again(step.created[0].name)
            result, changes = step(arrays, state.arrays if state else ())
            jax.block_until_ready([v.storage.cell.array for v in step.created])
        self._cache.remember_created(fn)
        if state:
            write_back(state, changes)
        return result

    def compiled_text(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> str:
        """Return the program of a call as XLA compiled it, without running it."""
        leaves, treedef, state = _flattened(args, kwargs or {})
        step = self._step(unjitted(fn), treedef, leaves, state)[1]
        with kept_if_finished(step.created):
            if step.created:
                raise created_too_late(
                    step.created[0].name,
                    "by a step of which the compiled text was asked before it was run for the "
                    "first time",
                )
        return step.compiled.as_text()

    def _step(
        self, fn: Callable[..., Any], treedef: Any, leaves: Sequence[Any], nnx: NnxState | None
    ) -> tuple[Any, Step]:
        keys = tuple(
            (Kind.OBJECT, None) if nnx is not None and is_nnx_object(leaf) else leaf_key(leaf)
            for leaf in leaves
        )
        signature = (treedef, keys, nnx.key() if nnx else None)
        step = self._cache.find(fn, signature)
        if step is None:
            step, variables = self._make(fn, treedef, leaves, keys, nnx)
            if step.created:
                return signature, step
            objects = [x for x, (kind, _) in zip(leaves, keys, strict=True) if kind is Kind.OBJECT]
            self._cache.add(fn, signature, step, variables, objects)
        return signature, step

    def _make(
        self,
        fn: Callable[..., Any],
        treedef: Any,
        leaves: Sequence[Any],
        keys: Sequence[tuple[Kind, Any]],
        nnx: NnxState | None,
    ) -> tuple[Step, Sequence[Any]]:
        size = self._mesh.devices.size
        array_leaves = [
            x for x, (kind, _) in zip(leaves, keys, strict=True) if kind is not Kind.OBJECT
        ]
        array_keys = [key for key in keys if key[0] is not Kind.OBJECT]
        check_components(array_leaves, size)
        rebuild = _rebuilder(treedef, leaves, keys)
        varying = tuple(kind is not Kind.EVERYWHERE for kind, _ in array_keys)

        def lifted(
            forms: Sequence[jax.ShapeDtypeStruct],
            weights: Any = None,
            axis_size: int | None = None,
        ) -> Any:
            return lift(
                self._strategy,
                Call(fn, rebuild, tuple(forms), varying, nnx),
                num_replicas=size,
                ops=self._ops,
                deferred=self._placement.deferred,
                weights=weights,
                devices=(self._device,),
                axis_size=axis_size,
            )

        if any(kind is Kind.UNEVEN for kind, _ in array_keys):
            return uneven.make_step(lifted, array_leaves, array_keys, self._mesh, self._placement)
        forms = [traced_form(x, key) for x, (_, key) in zip(array_leaves, array_keys, strict=True)]
        entering = [
            entering_leaf(leaf, kind, key, form, self._mesh)
            for leaf, (kind, key), form in zip(array_leaves, array_keys, forms, strict=True)
        ]
        step = lifted(forms)
        body, finish = even_body(step, entering, size), even_finish(step, size)
        with kept_if_finished(step.created):
            compiled = Step(step, entering, self._mesh, self._placement, body, finish)
        return compiled, step.touched


def _flattened(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], Any, NnxState | None]:
    """Return the leaves of a call, their structure, and the state of the NNX objects among them."""
    leaves, treedef = jax.tree.flatten((tuple(args), kwargs), is_leaf=is_leaf)
    objects = [leaf for leaf in leaves if is_nnx_object(leaf)]
    return leaves, treedef, take_apart(objects) if objects else None


def _rebuilder(
    treedef: Any, leaves: Sequence[Any], keys: Sequence[tuple[Kind, Any]]
) -> Callable[[Sequence[Any], Sequence[Any]], tuple[tuple, dict]]:
    def rebuild(arrays: Sequence[Any], nnx_objects: Sequence[Any]) -> tuple[tuple, dict]:
        arrays_left, objects_left = iter(arrays), iter(nnx_objects)
        filled = []
        for leaf, (kind, _) in zip(leaves, keys, strict=True):
            if kind is not Kind.OBJECT:
                filled.append(next(arrays_left))
            else:
                filled.append(next(objects_left) if is_nnx_object(leaf) else leaf)
        return jax.tree.unflatten(treedef, filled)

    return rebuild
