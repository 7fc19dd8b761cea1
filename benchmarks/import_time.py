"""What ``import distrib`` adds to ``import jax, flax, optax``, in fresh processes in alternation.

Target: at most 0.3 s, and no device is looked up.
"""

from __future__ import annotations

from typing import Any

from alternating import alternate, parser, report
from fresh_process import run_fresh

SECONDS_AT_MOST = 0.3

_PROGRAM = """
import json, sys, time
start = time.perf_counter()
import jax, flax, optax
if {ours}:
    import distrib
seconds = time.perf_counter() - start
if {ours}:
    from distrib.platform.jax_compat import backends_initialized
print(json.dumps([seconds, {ours} and backends_initialized()]))
"""


def main() -> None:
    args = parser(__doc__).parse_args()
    looked_up = []

    def seconds(ours: bool, calls: int) -> float:
        total = 0.0
        for _ in range(calls):
            taken, started = run_fresh(["-c", _PROGRAM.format(ours=ours)])
            total += taken
            looked_up.append(started)
        return total

    compared = alternate(
        "import jax, flax, optax, with and without distrib",
        lambda calls: seconds(True, calls),
        lambda calls: seconds(False, calls),
        rounds=1 if args.quick else 10,
        calls=1,
        difference_most=SECONDS_AT_MOST,
    )
    print(compared.line())
    print("devices looked up by import distrib:", "yes, MISSED" if any(looked_up) else "none, met")
    result: dict[str, Any] = {**compared.as_json(), "looked_up_devices": any(looked_up)}
    report([result], args.json)


if __name__ == "__main__":
    main()
