"""The parts of the sampler: penalties by token counts, the draw, log-probabilities."""
