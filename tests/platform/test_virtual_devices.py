"""Each case starts its own Python, because JAX starts once a process."""

import os
import subprocess
import sys
import textwrap

import pytest

from distrib.platform import virtual_devices

PREAMBLE = """
import os
import jax
from distrib import errors
from distrib.platform import ensure_thread_pool, jax_compat, set_logical_devices
"""


def run_python(code, **environment):
    """Run ``code`` in a fresh Python on the CPU; return what it printed and what it logged."""
    ours = ("PJRT_NPROC", "NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        env=inherited | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split(), result.stderr


SET_AND_SHOW = """
set_logical_devices("{kind}", {count})
assert not jax_compat.backends_initialized()
print(os.environ.get("PJRT_NPROC"), len(jax.devices()))
"""


def enough(count):
    return str(max(16, 4 * count, len(os.sched_getaffinity(0))))


@pytest.mark.parametrize(
    ("count", "environment", "threads", "logged"),
    [
        (2, {}, enough(2), ""),
        (8, {}, enough(8), ""),
        (1, {"PJRT_NPROC": "1"}, "1", ""),
        (2, {"PJRT_NPROC": "8"}, "8", ""),
        (2, {"PJRT_NPROC": "7"}, enough(2), "PJRT_NPROC was 7"),
        (2, {"NPROC": "9"}, "None", ""),
        (2, {"PJRT_NPROC": "many"}, enough(2), ""),
        (
            3,
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
            enough(3),
            "there will be 3",
        ),
        (3, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, enough(3), ""),
        (3, {"JAX_NUM_CPU_DEVICES": "5"}, enough(3), ""),
    ],
)
def test_devices_and_threads(count, environment, threads, logged):
    printed, log = run_python(SET_AND_SHOW.format(kind="cpu", count=count), **environment)
    assert printed == [threads, str(count)]
    assert logged in log
    assert logged or "virtual_devices.py" not in log


def test_too_late():
    printed, log = run_python("""
    set_logical_devices("CPU", 2)
    jax.devices()
    set_logical_devices("CPU", 2)  # There are two: nothing to do.
    try:
        set_logical_devices("CPU", 4)
    except errors.VirtualDevicesError as error:
        assert isinstance(error, RuntimeError)
        for text in ("4 virtual CPU", "JAX has started already, with 2", "first thing", "kernel"):
            assert text in str(error), error
        print("refused")
    """)
    assert printed == ["refused"]
    assert "virtual_devices.py" not in log


ENSURE_AND_SHOW = """
ensure_thread_pool()
assert not jax_compat.backends_initialized()
print(os.environ.get("PJRT_NPROC"))
"""


@pytest.mark.parametrize(
    ("before", "environment", "threads"),
    [
        ("", {}, "None"),
        ("", {"JAX_NUM_CPU_DEVICES": "1"}, "None"),
        ("", {"JAX_NUM_CPU_DEVICES": "8"}, enough(8)),
        ("", {"XLA_FLAGS": "--a=b --xla_force_host_platform_device_count=6"}, enough(6)),
        ("", {"JAX_NUM_CPU_DEVICES": "8", "PJRT_NPROC": "64"}, "64"),
        ("", {"JAX_NUM_CPU_DEVICES": "8", "PJRT_NPROC": "4"}, enough(8)),
        ("jax.config.update('jax_num_cpu_devices', 5)", {}, enough(5)),
    ],
)
def test_devices_made_by_other_means(before, environment, threads):
    printed, _ = run_python(before + ENSURE_AND_SHOW, **environment)
    assert printed == [threads]


@pytest.mark.parametrize("threads", ["2", "64"])
def test_one_warning_when_it_is_too_late_for_threads(threads):
    code = "jax.devices(); ensure_thread_pool(); ensure_thread_pool()"
    _, log = run_python(code, JAX_NUM_CPU_DEVICES="8", PJRT_NPROC=threads)
    assert log.count("may deadlock") == (threads == "2")
    if threads == "2":
        assert "8 virtual CPU devices and a pool of 2 threads: a step with" in log
        assert f"PJRT_NPROC={enough(8)}" in log


def test_collectives_on_eight_devices_do_not_deadlock():
    printed, _ = run_python("""
    set_logical_devices("CPU", 8)
    import jax.numpy as jnp
    from distrib.platform import replica_mesh
    mesh, spec = replica_mesh(jax.devices()), jax.P("replica")
    step = jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x, "replica") / 8 + x * 0, mesh=mesh, in_specs=spec, out_specs=spec))
    value = jnp.ones((8, 64))
    for _ in range(200):
        value = step(value)
    print(float(value.sum()))
    """)
    assert printed == ["512.0"]


@pytest.mark.parametrize("kind", ["GPU", "TPU", "", None])
def test_only_the_cpu_can_be_split(kind):
    with pytest.raises(ValueError, match="only 'CPU' can be split"):
        virtual_devices.set_logical_devices(kind, 2)


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", None])
def test_the_count_is_a_positive_int(count):
    with pytest.raises(ValueError, match="the count must be an int of at least 1"):
        virtual_devices.set_logical_devices("CPU", count)
