"""Floor 2: a folder per op. `__init__.py` is the op (signature, checks, dispatch), `reference.py` its torch specification.

Ops know tensors, row geometry and segments; they never know requests, configuration or models.
"""

EMPTY = -1  # in index tensors: no position, no row, no page
