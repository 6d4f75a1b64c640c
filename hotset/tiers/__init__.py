"""Floor 4: where each request's rows live, and how they move between host and device.

`ledger` keeps the books (pages, residence; no tensors) and writes commands; `coordinator` carries them out on tensors.
The scheduler above decides when.
"""
