"""The kinds of attention. Each has a module of facts, `*_spec`, which needs no torch, and a module that computes it."""
