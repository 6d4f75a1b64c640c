"""Speculative decoding: everything that drafts tokens, decides how many, verifies them and draws consequences.

`settings` decides once how an engine drafts. The scheduler meets drafts through `schedule.speculation.Speculation`,
which `speculation` implements with a drafter (`drafters`) and the measured costs (`costs`, `measuring`). The runner
meets them through `worker.WorkerDrafts`, which runs the MTP layer (`mtp`, `mtp_graphs`) after each step. `segments` has
what only the device knows: which drafts a step verifies, and how many of them are right.
"""
