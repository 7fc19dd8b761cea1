"""What ``import distrib`` adds to ``import jax, flax, optax``, in fresh processes in alternation.

Target: at most 0.3 s, and no device is looked up.
"""

from __future__ import annotations

import time

import jax
from alternating import alternate, parser, report
from fresh_process import run_fresh

SECONDS_AT_MOST = 0.3

_PROGRAM = """
import json, sys, time
start = time.perf_counter()
import jax, flax, optax
{extra}
seconds = time.perf_counter() - start
from jax.extend import backend
print(json.dumps({{"seconds": seconds, "started": jax.extend.backend.backends() if False else None}}))
"""


def main() -> None:
    pass


if __name__ == "__main__":
    main()
