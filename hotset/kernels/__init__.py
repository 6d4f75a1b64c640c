"""Floor 2: a folder per op: `__init__.py` has signature, checks and dispatch, `reference.py` is the specification.

Ops know tensors, row geometry and segments; they never know requests, configuration or models.
"""

EMPTY = -1  # in index tensors: no position, no row, no page
