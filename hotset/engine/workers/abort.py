"""The flag that ends the waits of this worker's collectives after another worker has failed."""

import torch

from hotset.base.errors import EngineStopped


class AbortFlag:
    """A word that kernels read while they wait for other ranks. Once it is set, no kernel of this worker waits.

    It stays set. The results of the steps in flight are then undefined, so the worker must call `check` before it
    reports a step.
    """

    def __init__(self, device: torch.device) -> None:
        # [1] int32: 0, or 1 if set. With a GPU it is pinned, so kernels can read it at the same address.
        self.word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def set(self) -> None:
        """Sets the flag. Any thread may call this at any time, also while the main thread waits for the device."""
        self.word.fill_(1)

    @property
    def is_set(self) -> bool:
        return bool(self.word.item())

    def check(self) -> None:
        """Raises EngineStopped if the flag is set."""
        if self.is_set:
            raise EngineStopped("steps in flight were aborted: another worker failed, or the engine has ended")
