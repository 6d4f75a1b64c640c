"""Floor 4: where the rows of each request are, and how they move between host and device.

`ledger` records pages and residences without tensors, and returns commands. `kv_memory` executes the commands on
tensors. The scheduler, one floor above, decides when a residence changes.
"""
