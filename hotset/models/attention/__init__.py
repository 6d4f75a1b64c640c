"""The kinds of attention: for each, a module of facts, `*_spec`, which needs no torch, and one that computes."""
