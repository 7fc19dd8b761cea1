"""MNIST under each strategy, and the cost of ``run``, on whatever GPUs there are, within 4 minutes.

Prints a summary and leaves with status 1 if something failed. Where there is no GPU it says so and
leaves with 0; with ``--allow_cpu`` it runs a tiny version on virtual CPU devices instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from alternating import parser, report
from fresh_process import run_fresh

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240.0
STRATEGIES = ("one_device", "mirrored", "central_storage")
LEAST_SECONDS = 10.0
"""With less time left, a check is not begun."""

_COUNT_GPUS = """
import json, jax
try:
    devices = jax.devices("gpu")
except RuntimeError:
    devices = []
print(json.dumps([str(device.device_kind) for device in devices]))
"""


@dataclasses.dataclass(frozen=True)
class Check:
    """How one check went.

    Attributes:
      name: what was run.
      status: ``"passed"``, ``"failed"`` or ``"not run"``.
      seconds: how long it took.
      summary: its last line, or why it did not pass.
    """

    name: str
    status: str
    seconds: float
    summary: str


class Checks:
    """Runs commands one after the other until a deadline.

    Args:
      seconds: the time for all of them together.
      fewer: so much of it is left over for the summary.
    """

    def __init__(self, seconds: float, fewer: float = 5.0):
        self._deadline = time.monotonic() + seconds - fewer
        self.done: list[Check] = []

    def run(self, name: str, command: Sequence[str]) -> None:
        """Run a Python script with its arguments; whatever happens becomes a :class:`Check`."""
        left = self._deadline - time.monotonic()
        if left < LEAST_SECONDS:
            self._add(Check(name, "not run", 0.0, "no time left"))
            return
        start = time.monotonic()
        try:
            finished = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=left,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self._add(Check(name, "failed", time.monotonic() - start, "stopped at the deadline"))
            return
        lines = [line.strip() for line in finished.stdout.splitlines() if line.strip()]
        status = "failed" if finished.returncode else "passed"
        if finished.returncode:
            print(finished.stdout[-4000:], flush=True)
        # A benchmark has a line for each comparison, the example a last line with its result.
        told = [line for line in lines if ": ours " in line] or lines[-1:]
        self._add(Check(name, status, time.monotonic() - start, "\n    ".join(told)))

    def _add(self, check: Check) -> None:
        self.done.append(check)
        print(f"{check.name}: {check.status} in {check.seconds:.0f} s", flush=True)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--data_dir", help="the files of MNIST; else the example looks for them")
    flags.add_argument("--seconds", type=float, default=SECONDS, help="for everything together")
    flags.add_argument("--allow_cpu", action="store_true", help="without a GPU, run a tiny version")
    args = flags.parse_args()
    start = time.monotonic()
    gpus = run_fresh(["-c", _COUNT_GPUS], timeout=args.seconds / 2)
    if not gpus and not args.allow_cpu:
        print("There is no GPU that JAX can use on this machine: nothing was checked.")
        report([], args.json)
        return
    print(f"{len(gpus)} GPUs: {', '.join(gpus)}" if gpus else "No GPU: a tiny version on the CPU.")
    checks = Checks(args.seconds - (time.monotonic() - start))
    check_all(checks, gpus, args)
    print(f"\nSummary, after {time.monotonic() - start:.0f} s:")
    for check in checks.done:
        print(f"  {check.name}: {check.status} ({check.seconds:.0f} s)\n    {check.summary}")
    report([dataclasses.asdict(check) for check in checks.done], args.json)
    if any(check.status != "passed" for check in checks.done):
        raise SystemExit(1)


def check_all(checks: Checks, gpus: Sequence[str], args: argparse.Namespace) -> None:
    """Run the cost of ``run`` and the example under each strategy."""
    count = len(gpus) or 2
    kind = "GPU" if gpus else "CPU"
    quick = [] if gpus and not args.quick else ["--quick"]
    overhead = str(ROOT / "benchmarks" / "run_overhead.py")
    numbers = ",".join(str(n) for n in (1, 2, 4, 8) if n <= count)
    checks.run("run overhead", [overhead, f"--kind={kind}", f"--devices={numbers}", *quick])
    train = str(ROOT / "examples" / "mnist" / "train.py")
    for strategy in STRATEGIES:
        devices = 1 if strategy == "one_device" else count
        command = [train, f"--strategy={strategy}", f"--num_devices={devices}"]
        if args.data_dir is not None:
            command.append(f"--data_dir={args.data_dir}")
        if quick:
            command += ["--epochs=1", "--train_examples=512"]
        checks.run(f"MNIST, {strategy}, {devices} {kind}", command)


if __name__ == "__main__":
    main()
