"""A fresh Python, for what can happen once in a process, or may end it."""

import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Any

_REPO_ROOT = pathlib.Path(__file__).resolve().parents[2]
_OURS = ("PJRT_NPROC", "NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")


def _arguments(code: str, environment: dict[str, str]) -> dict[str, Any]:
    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    ours = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_REPO_ROOT)}
    return {
        "args": [sys.executable, "-c", textwrap.dedent(code)],
        "env": inherited | ours | environment,
        "cwd": _REPO_ROOT,
        "text": True,
    }


def run_python(code: str, *, timeout: float = 120.0, **environment: str) -> str:
    """Run ``code`` in a fresh Python on the CPU and return what it printed.

    Args:
      code: the program, indented or not.
      timeout: seconds until it is killed, which fails the test.
      **environment: variables to add.

    Raises:
      AssertionError: if it ends with an error, which is shown.
      subprocess.TimeoutExpired: if it does not end in time.
    """
    result = subprocess.run(
        **_arguments(code, environment), capture_output=True, timeout=timeout, check=False
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def start_python(code: str, **environment: str) -> subprocess.Popen[str]:
    """Start ``code`` in a fresh Python on the CPU, its output in pipes; use it in ``with``."""
    return subprocess.Popen(
        **_arguments(code, environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
