"""``run``: find or make the program of a call, and run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from distrib.collectives import CrossDeviceOps
from distrib.config import check_numerics_enabled
from distrib.engines import uneven
from distrib.engines.arguments import Arguments
from distrib.engines.cache import CompileCache
from distrib.engines.calls import check_components, check_outside_trace, unjitted
from distrib.engines.creation import created_again, created_too_late, kept_if_finished
from distrib.engines.explanation import Explanation, explained, taken
from distrib.engines.function import python_function
from distrib.engines.lift import Call, Lifted, lift
from distrib.engines.many_steps import (
    Stretch,
    after_steps,
    check_joinable,
    joined,
    scanned,
    stretches,
    with_step_axis,
)
from distrib.engines.nnx_objects import NnxState, write_back
from distrib.engines.placement import UpdatePlacement
from distrib.engines.refusals import unequal_shapes
from distrib.engines.run_options import NO_OPTIONS, RunOptions
from distrib.engines.signature import Kind, is_argument, traced_form
from distrib.engines.spmd import Step, entering_leaf, even_body, even_finish, even_out_specs
from distrib.engines.uncompiled import Runs, Uncompiled
from distrib.errors import UnevenReplicasError
from distrib.platform import compilation_settings, leaves_with_paths
from distrib.variables import Variable, live_variables


class SpmdEngine:
    """Runs the steps of one strategy.

    Args:
      strategy: the strategy, which replica contexts show to the user.
      mesh: a replica on each of its devices.
      ops: how values are added over the replicas.
      placement: where variables live and updates are applied.
      device: what a replica context gives as its device.
      threads: what runs the calls with uneven replicas that cannot be compiled.
    """

    def __init__(
        self,
        strategy: Any,
        mesh: Mesh,
        ops: CrossDeviceOps,
        placement: UpdatePlacement,
        device: str,
        threads: Runs,
    ):
        self._strategy = strategy
        self._mesh = mesh
        self._ops = ops
        self._placement = placement
        self._device = device
        self._threads = threads
        self._cache = CompileCache()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        options: RunOptions = NO_OPTIONS,
    ) -> Any:
        """Call ``fn`` once for each replica, in one compiled program.

        Raises:
          NestedTraceError: inside of a JAX transformation.
          UnevenReplicasError: if replicas see unequal shapes, and the options forbid it.
        """
        check_outside_trace()
        return self._run(unjitted(fn), Arguments(args, kwargs), options, in_replica=True)

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` in cross-replica context, in one program with the replicas that it runs.

        Raises:
          NestedTraceError: inside of a JAX transformation.
        """
        check_outside_trace()
        return self._run(fn, Arguments(args, kwargs), NO_OPTIONS, in_replica=False)

    def run_steps(
        self,
        fn: Callable[..., Any],
        calls: Sequence[tuple[Sequence[Any], dict[str, Any]]],
        options: RunOptions,
    ) -> Any:
        """Run a step for each of several arguments, in as few programs as their shapes allow.

        Where updates are applied outside of the program, each step is a call of its own.

        Returns:
          What the steps returned, each array with a leading axis of steps.

        Raises:
          NestedTraceError: inside of a JAX transformation.
          OutputError: if the steps return arrays of different shapes.
        """
        check_outside_trace()
        fn = unjitted(fn)
        arguments = [Arguments(*call) for call in calls]
        parts = stretches(arguments, together=not self._updates_apart())
        steps: list[Step | Uncompiled] = []
        created: list[Variable] = []
        with kept_if_finished(created):
            for part in parts:
                steps.append(self._step(fn, part.first, options, True, part))
                created += steps[-1].created
            check_joinable([step.output_shapes for step in steps if step.output_shapes is not None])
        results, done = [], 0
        for part, step in zip(parts, steps, strict=True):
            with after_steps(done):
                result = self._called(step, fn, part.first, part.arrays, in_replica=True)
            results.append(result if part.count > 1 else with_step_axis(result))
            done += part.count
        return joined(results)

    def _updates_apart(self) -> bool:
        """Tell whether updates may be applied outside of the replicas' program, at each step."""
        variables = live_variables(self._strategy)
        return self._placement.deferred or any(v.storage.shards is not None for v in variables)

    def compiled_text(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> str:
        """Return the program of a call as XLA compiled it, without running it.

        Raises:
          UnevenReplicasError: if there is none.
        """
        fn, in_replica = python_function(fn)
        step = self._step(fn, Arguments(args, kwargs or {}), NO_OPTIONS, in_replica)
        return self._only_compiled(step).compiled.as_text()

    def _run(
        self, fn: Callable[..., Any], arguments: Arguments, options: RunOptions, in_replica: bool
    ) -> Any:
        step = self._step(fn, arguments, options, in_replica)
        return self._called(step, fn, arguments, arguments.arrays, in_replica)

    def _called(
        self,
        step: Step | Uncompiled,
        fn: Callable[..., Any],
        arguments: Arguments,
        arrays: Sequence[Any],
        in_replica: bool,
    ) -> Any:
        """Run a step, and put the new state of NNX objects back into them."""
        if isinstance(step, Uncompiled):
            return step.run(self._strategy, self._threads, fn, arguments, in_replica)
        if step.created:
            return self._run_first(fn, step, arrays, arguments.nnx)
        if arguments.nnx is None:
            return step(arrays)[0]
        result, changes = step(arrays, arguments.nnx.arrays)
        write_back(arguments.nnx, changes)
        return result

    def _run_first(
        self, fn: Callable[..., Any], step: Step, arrays: Sequence[Any], state: NnxState | None
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

    def explain(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Explanation:
        """Describe the step of a call, without running it.

        Raises:
          UnevenReplicasError: if it has no program.
          NestedTraceError: inside of a JAX transformation.
        """
        check_outside_trace()
        kwargs = kwargs or {}
        arguments = Arguments(args, kwargs)
        fn, in_replica = python_function(fn)
        step = self._step(fn, arguments, NO_OPTIONS, in_replica)
        step = self._only_compiled(step)
        named = leaves_with_paths({"args": tuple(args), "kwargs": kwargs}, is_leaf=is_argument)
        takes = taken([path for path, _ in named], arguments.leaves, arguments.keys)
        return explained(fn, self._mesh, step.use, takes, step.compiled)

    def _only_compiled(self, step: Step | Uncompiled) -> Step:
        """Return a step that was made to be looked at and not to be run.

        Raises:
          UnevenReplicasError: if it has no program.
          ContextError: if it creates variables, which only running it can do.
        """
        if isinstance(step, Uncompiled):
            raise step.refusal
        with kept_if_finished(step.created):
            if step.created:
                raise created_too_late(
                    step.created[0].name,
                    "by a step that was looked at before it was run for the first time",
                )
        return step

    def _step(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        options: RunOptions,
        in_replica: bool,
        stretch: Stretch | None = None,
    ) -> Step | Uncompiled:
        """Find or make the program of a call, or of a stretch of steps."""
        steps = None if stretch is None else stretch.key
        check_numerics = check_numerics_enabled()
        settings = compilation_settings()
        signature = (*arguments.key, in_replica, options.key, check_numerics, steps, settings)
        step = self._cache.find(fn, signature)
        if step is None:
            step, variables = self._make(
                fn, arguments, options, in_replica, check_numerics, stretch
            )
            if isinstance(step, Uncompiled) or not step.created:
                self._cache.add(fn, signature, step, variables, arguments.objects)
        return step

    def _make(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        options: RunOptions,
        in_replica: bool,
        check_numerics: bool,
        stretch: Stretch | None,
    ) -> tuple[Step | Uncompiled, Sequence[Any]]:
        size = self._mesh.devices.size
        check_components(arguments.arrays, size)
        varying = tuple(kind is not Kind.EVERYWHERE for kind, _ in arguments.array_keys)

        def lifted(
            forms: Sequence[jax.ShapeDtypeStruct],
            weights: Any = None,
            axis_size: int | None = None,
        ) -> Lifted:
            return lift(
                self._strategy,
                Call(fn, arguments.rebuild, tuple(forms), varying, arguments.nnx, in_replica),
                num_replicas=size,
                ops=self._ops,
                deferred=self._placement.deferred,
                weights=weights,
                devices=(self._device,),
                axis_size=axis_size,
                check_numerics=check_numerics,
            )

        if arguments.are_uneven:
            return self._make_uneven(lifted, fn, arguments, options)
        return self._make_even(lifted, arguments, options, stretch)

    def _make_uneven(
        self,
        lifted: Callable[..., Lifted],
        fn: Callable[..., Any],
        arguments: Arguments,
        options: RunOptions,
    ) -> tuple[Step | Uncompiled, Sequence[Any]]:
        if not options.experimental_enable_dynamic_batch_size:
            raise unequal_shapes(arguments.arrays)
        try:
            return uneven.make_step(
                lifted,
                arguments.arrays,
                arguments.array_keys,
                self._mesh,
                self._placement,
                options.experimental_xla_options,
            )
        except UnevenReplicasError as refusal:
            return Uncompiled(refusal, fn), []

    def _make_even(
        self,
        lifted: Callable[..., Lifted],
        arguments: Arguments,
        options: RunOptions,
        stretch: Stretch | None,
    ) -> tuple[Step, Sequence[Any]]:
        size = self._mesh.devices.size
        entering = [
            entering_leaf(leaf, kind, key, traced_form(leaf, key), self._mesh)
            for leaf, (kind, key) in zip(arguments.arrays, arguments.array_keys, strict=True)
        ]
        step = lifted(
            [
                traced_form(leaf, key)
                for leaf, (_, key) in zip(arguments.arrays, arguments.array_keys, strict=True)
            ]
        )
        body = even_body(step, entering, size)
        with kept_if_finished(step.created):
            if stretch is not None and stretch.count > 1:
                if step.created:
                    raise created_too_late(
                        step.created[0].name,
                        "by the first of several steps in one call. Run one step alone first",
                    )
                on_cpu = self._mesh.devices.flat[0].platform == "cpu"
                body = scanned(body, step, stretch, size, on_cpu=on_cpu)
                entering = stretch.arranged(entering)
            made = Step(
                step,
                entering,
                self._mesh,
                self._placement,
                body,
                even_finish(step, size),
                out_specs=even_out_specs(step),
                output_shapes=[form.shape for form in step.jaxpr.out_avals[: step.num_outputs]],
                xla_options=options.experimental_xla_options,
            )
        return made, step.touched
