"""Floor 5: which request computes what in which step. Pure policy: no torch, no text, no HTTP."""
