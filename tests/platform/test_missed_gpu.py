"""The line about a GPU that JAX does not use, in fresh processes."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import pathlib, sys
from distrib.platform import missed_gpu
import distrib
for _ in range(2):
    missed_gpu.warn_of_missed_gpu(pathlib.Path(sys.argv[1]))
    distrib.MirroredStrategy(["CPU:0"])
"""


def lines_logged(repo_root, driver, platforms):
    """Return the lines about GPUs; JAX here has none, whatever the machine has."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(driver)],
        cwd=repo_root,
        env={**environment, **platforms, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [line for line in finished.stderr.splitlines() if "distrib[cuda12]" in line]


@pytest.mark.parametrize(
    ("exists", "platforms", "count"),
    [(True, {}, 1), (False, {}, 0), (True, {"JAX_PLATFORMS": "cpu"}, 0)],
    ids=["missed", "no driver", "the CPU was chosen"],
)
def test_it_is_logged_once_and_only_where_a_gpu_is_missed(
    repo_root, tmp_path, exists, platforms, count
):
    driver = tmp_path / "version"
    if exists:
        driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module")
    lines = lines_logged(repo_root, driver, platforms)
    assert len(lines) == count
    for line in lines:
        assert 'pip install "distrib[cuda12]"' in line
        assert "JAX_PLATFORMS=cpu" in line
        assert str(driver) in line
