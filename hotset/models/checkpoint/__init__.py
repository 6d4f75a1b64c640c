"""Finds and reads checkpoints: call `find_model`, then `open_weights`."""

from hotset.models.checkpoint.files import ModelFiles, find_model, open_weights
from hotset.models.checkpoint.source import Progress, TensorSlice, WeightSource

__all__ = ["ModelFiles", "Progress", "TensorSlice", "WeightSource", "find_model", "open_weights"]
