import subprocess
import sys

import pytest

from distrib import config, errors


def test_logical_devices():
    assert config.logical_devices("cpu") == [f"CPU:{i}" for i in range(8)]
    assert config.logical_devices("abacus") == []


def test_set_logical_devices_again():
    config.set_logical_devices("CPU", 8)
    with pytest.raises(errors.VirtualDevicesError, match="3 virtual CPU.*JAX has started.*with 8"):
        config.set_logical_devices("CPU", 3)


def test_import_looks_up_no_device():
    code = (
        "import distrib.config\n"
        "from distrib.platform import jax_compat\n"
        "assert not jax_compat.backends_initialized()\n"
        "jax_compat._backends_are_initialized = None\n"  # The fallback starts nothing, either.
        "assert not jax_compat.backends_initialized()\n"
        "distrib.config.set_logical_devices('CPU', 3)\n"
        "assert len(distrib.config.logical_devices('CPU')) == 3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
