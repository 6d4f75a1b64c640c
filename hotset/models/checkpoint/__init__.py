"""Finds and reads checkpoints: call `files.find_model`, which needs no torch, then `weights.open_weights`."""
