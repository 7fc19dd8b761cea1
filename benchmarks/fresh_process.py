"""Run a benchmark's own script again in a new process, and take the JSON that it prints last.

The number of virtual devices and the cost of an import can be had once in a process only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def run_fresh(arguments: Sequence[str], timeout: float | None = None) -> Any:
    """Run this interpreter with ``arguments``; return the value of the last line that it prints.

    The lines before it are passed on. A child's errors go where this process's do.

    Raises:
      RuntimeError: if the child fails.
      subprocess.TimeoutExpired: if it takes more than ``timeout`` seconds.
    """
    finished = subprocess.run(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = finished.stdout.splitlines()
    if finished.returncode != 0 or not lines:
        raise RuntimeError(f"{' '.join(arguments)} ended with status {finished.returncode}")
    for line in lines[:-1]:
        print(line, flush=True)
    return json.loads(lines[-1])
