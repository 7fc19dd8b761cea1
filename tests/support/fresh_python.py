"""A fresh Python, for what can happen once in a process, or may end it."""

import os
import pathlib
import subprocess
import sys
import textwrap

_REPO_ROOT = pathlib.Path(__file__).resolve().parents[2]
_OURS = ("PJRT_NPROC", "NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")


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
    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=inherited | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_REPO_ROOT)} | environment,
        cwd=_REPO_ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout
