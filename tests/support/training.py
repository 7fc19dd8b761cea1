"""The smallest training: a state of one parameter, and a pass over a dataset."""

import optax

import distrib


def linear(strategy, tx=None, w=0.0, **fields):
    """Return a state with the one parameter ``w``."""
    with strategy.scope():
        return distrib.TrainState.create(
            apply_fn=None, params={"w": w}, tx=tx or optax.sgd(0.1), **fields
        )


def run_epoch(strategy, step, data, batch_size):
    batches = strategy.experimental_distribute_dataset(data, batch_size=batch_size)
    return [strategy.run(step, args=(batch,)) for batch in batches]
