"""Floor 5: decides which requests compute which tokens in each step. Pure policy: no torch, no text, no HTTP."""
