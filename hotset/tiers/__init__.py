"""Floor 4: where each request's rows live, and how they move between host and device.

`ledger` records pages and residences, has no tensors, and returns commands. `kv_memory` executes the commands on
tensors. The scheduler, one floor above, decides when.
"""
