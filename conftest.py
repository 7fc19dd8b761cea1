"""The ground that every test and doctest stands on: eight virtual CPU devices and a strict JAX.

It stands at the root, and not in ``tests/``, because the doctests of ``distrib/`` need it too.
"""

import os

# The tests state their results for virtual CPU devices: a GPU in the machine must not take over.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import distrib.config  # noqa: E402

# Before any test module is imported: the number cannot change once JAX has started.
distrib.config.set_logical_devices("CPU", 8)

import jax  # noqa: E402

# Silent broadcasting between ranks hides mistakes in shapes. Doubles (x64) stay off, as for users.
jax.config.update("jax_numpy_rank_promotion", "raise")
