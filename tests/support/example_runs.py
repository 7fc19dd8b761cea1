"""Runs of the scripts in ``examples/mnist``, as a user starts them."""

import gzip
import os
import pathlib
import re
import struct
import subprocess
import sys

import numpy as np

REPO_ROOT = pathlib.Path(__file__).resolve().parents[2]
STRATEGIES = ("one_device", "mirrored", "central_storage")

_EXAMPLE = REPO_ROOT / "examples" / "mnist"
_REAL = REPO_ROOT.parent / "shared" / "data" / "mnist"
_OURS = ("PJRT_NPROC", "NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
_LAST_LINE = re.compile(r"(<distrib\.\w+ of .*>) ends with test accuracy ([\d.]+)%, ([\d,]+) ")


def run_script(
    name: str, *flags: str, timeout: float = 280.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of the example, with variables added; Python's warnings are errors."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
    return subprocess.run(
        [sys.executable, "-W", "error", str(_EXAMPLE / name), *flags],
        env=inherited | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPO_ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def accuracy_of(name: str, *flags: str) -> tuple[float, str]:
    """Run a script to its end; returns what :func:`result_of` does."""
    return result_of(run_script(name, *flags))


def result_of(done: subprocess.CompletedProcess[str]) -> tuple[float, str]:
    """Read the last line of a script that has ended.

    Returns:
      The test accuracy that it printed, in percent, and the strategy's name.

    Raises:
      AssertionError: if it failed, or its last line is not the expected one; with all it wrote.
    """
    found = _LAST_LINE.fullmatch(done.stdout.strip().removesuffix("examples a second"))
    assert done.returncode == 0 and found, f"{done.stdout}\n{done.stderr}"
    assert int(found[3].replace(",", "")) > 0
    return float(found[2]), found[1]


def digits_folder(scratch: pathlib.Path) -> pathlib.Path:
    """Return a folder of MNIST files: the real ones, or else scikit-learn's digits, enlarged."""
    if _REAL.is_dir():
        return _REAL
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.kron(digits.images * 15, np.ones((1, 3, 3))).astype(np.uint8)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    labels = digits.target.astype(np.uint8)
    for split, part in (("train", slice(1400)), ("t10k", slice(1400, None))):
        _write_idx(scratch / f"{split}-images-idx3-ubyte.gz", images[part])
        _write_idx(scratch / f"{split}-labels-idx1-ubyte.gz", labels[part])
    return scratch


def _write_idx(path: pathlib.Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes(), 1))
