"""The models that are timed, and the step that someone would write for them by hand.

Plain functions of plain dicts: ours and the reference compute exactly the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

AXIS = "replica"
BATCH = 128
LEARNING_RATE = 0.1

Params = dict[str, Any]
Loss = Callable[[Params, Any, Any], jax.Array]


def mlp_params(seed: int = 0) -> Params:
    """Return the parameters of a perceptron 784-128-10."""
    draw = np.random.default_rng(seed)
    return {
        "w1": _normal(draw, 784, 128),
        "b1": np.zeros(128, np.float32),
        "w2": _normal(draw, 128, 10),
        "b2": np.zeros(10, np.float32),
    }


def mlp(params: Params, x: Any) -> jax.Array:
    """Return logits ``[batch, 10]`` of images ``[batch, 784]``."""
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def cnn_params(seed: int = 0) -> Params:
    """Return the parameters of two convolutions with stride 2 and a dense layer."""
    draw = np.random.default_rng(seed)
    return {
        "c1": _normal(draw, 3, 3, 1, 16),
        "c2": _normal(draw, 3, 3, 16, 32),
        "w": _normal(draw, 7 * 7 * 32, 10),
        "b": np.zeros(10, np.float32),
    }


def cnn(params: Params, x: Any) -> jax.Array:
    """Return logits ``[batch, 10]`` of images ``[batch, 784]``."""
    x = x.reshape(-1, 28, 28, 1)
    for name in ("c1", "c2"):
        x = jax.lax.conv_general_dilated(
            x, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x)
    return x.reshape(x.shape[0], -1) @ params["w"] + params["b"]


def mean_loss(apply: Callable[[Params, Any], jax.Array]) -> Loss:
    """Return the mean cross entropy of a model over the examples of a replica."""

    def loss(params: Params, x: Any, y: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()

    return loss


def hand_written_step(loss: Loss, tx: optax.GradientTransformation, mesh: Mesh) -> Any:
    """Return ``(params, opt_state, x, y) -> (params, opt_state, losses)``, jitted; it donates."""

    def step(params: Params, opt_state: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        grads = jax.lax.pmean(grads, AXIS)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value[None]

    everywhere, split = PartitionSpec(), PartitionSpec(AXIS)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(everywhere, everywhere, split, split),
        out_specs=(everywhere, everywhere, split),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def random_images(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``[count, 784]`` and labels ``[count]`` of the form of MNIST."""
    draw = np.random.default_rng(seed)
    images = draw.random((count, 784), np.float32)
    return images, draw.integers(0, 10, count, np.int32)


def _normal(draw: np.random.Generator, *shape: int) -> np.ndarray:
    return draw.normal(scale=0.05, size=shape).astype(np.float32)
