"""Floor 2: one folder per op. `__init__.py` has signature, checks and dispatch; `reference.py` is the specification.

Ops depend on tensors, row layouts and segments, never on requests, configuration or models.
"""

EMPTY = -1  # in index tensors: no position, row, page, seat or expert
MAX_POSITIONS = 8_192  # positions of one query that a GPU can look up and swap in: their lists are in shared memory
