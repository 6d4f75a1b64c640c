"""Floor 2: one folder per op. `__init__.py` is the op (signature, checks, dispatch), `reference.py` its specification in torch.

Ops know tensors, row geometry and segments; they never know requests, configuration or models.
"""

EMPTY = -1  # in index tensors: no position, no row, no page
