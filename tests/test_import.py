"""What ``import distrib`` costs and leaves alone, each measured in a fresh process."""

import json
import subprocess
import sys

import pytest

# Heavy or optional packages: whoever needs one imports it on first use.
NOT_IMPORTED = ["IPython", "flax.nnx", "grain", "matplotlib", "orbax", "tensorflow", "torch"]

IMPORT_SECONDS_ALLOWED = 0.3


def run_fresh(program: str, **kwargs) -> dict:
    """Run a program in a new interpreter and return the JSON that it prints last."""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **kwargs,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def test_import_looks_up_no_device_and_stays_light(repo_root):
    program = f"""
import json, sys, threading
import distrib, distrib.config
from jax._src import xla_bridge
print(json.dumps({{
    "started": xla_bridge.backends_are_initialized(),
    "imported": [name for name in {NOT_IMPORTED!r} if name in sys.modules],
    "threads": threading.active_count(),
}}))
"""
    found = run_fresh(program, cwd=repo_root)
    assert found == {"started": False, "imported": [], "threads": 1}


def test_import_warns_of_nothing(repo_root):
    program = """
import jax, flax.linen, optax
import warnings
warnings.simplefilter("error")
import distrib
print("{}")
"""
    run_fresh(program, cwd=repo_root)


def test_import_adds_little_time(repo_root):
    program = """
import jax, flax, optax
import json, time
start = time.perf_counter()
import distrib
print(json.dumps({"seconds": time.perf_counter() - start}))
"""
    # The best of several: other programs on the machine only ever make it slower.
    best = min(run_fresh(program, cwd=repo_root)["seconds"] for _ in range(3))
    assert best <= IMPORT_SECONDS_ALLOWED


@pytest.mark.parametrize(
    "script",
    ["examples/mnist/train.py", "examples/mnist/custom_loop.py", "examples/mnist/nnx_train.py"],
)
def test_an_example_names_its_flags_before_it_looks_up_a_device(repo_root, script):
    program = f"""
import json, runpy, sys
sys.argv = [{script!r}]
sys.path.insert(0, {script!r}.rpartition("/")[0])
runpy.run_path({script!r}, run_name="imported")
from absl import flags
from jax._src import xla_bridge
print(json.dumps({{
    "started": xla_bridge.backends_are_initialized(),
    "flags": [name for name in ("strategy", "num_devices", "data_dir") if name in flags.FLAGS],
    "strategies": flags.FLAGS["strategy"].parser.enum_values,
}}))
"""
    found = run_fresh(program, cwd=repo_root)
    assert not found["started"]
    assert found["flags"] == ["strategy", "num_devices", "data_dir"]
    assert {"one_device", "mirrored", "central_storage"} <= set(found["strategies"])
