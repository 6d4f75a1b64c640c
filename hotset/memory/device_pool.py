"""The device pool: rows and index keys of all layers, `[layer][row]`, in pages."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.kernels.rows import RowLayout


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token costs: one row per layer, and one index key per index group (none without an indexer)."""

    layers: int
    row: RowLayout
    key_groups: int = 0
    key: RowLayout | None = None

    @property
    def token_bytes(self) -> int:
        keys = self.key_groups * self.key.row_bytes if self.key is not None else 0
        return self.layers * self.row.row_bytes + keys


class DevicePool:
    """`pages` pages of `page_rows` rows in device memory. It owns bytes; who holds a page is the allocator's to say.

    Fresh memory is not cleared: a row is read only after it was written.
    """

    def __init__(self, shape: KvShape, pages: int, page_rows: int, device: torch.device) -> None:
        self.page_rows = page_rows
        self.device = device
        row_count = pages * page_rows
        self.rows = torch.empty(shape.layers, row_count, shape.row.width, dtype=shape.row.dtype, device=device)
        self.keys: Tensor | None = None
        if shape.key is not None:
            self.keys = torch.empty(shape.key_groups, row_count, shape.key.width, dtype=shape.key.dtype, device=device)
