"""Finds and reads checkpoints: call `files.find_model`, which does not import torch, then `weights.open_weights`."""
