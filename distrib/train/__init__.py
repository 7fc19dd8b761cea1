"""Training: the train state."""

from distrib.train.train_state import TrainState

__all__ = ["TrainState"]
