"""The device pool: pages of bytes, `[layer][page]`, that hold rows, index keys, maps or a workspace."""

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.rows import RowLayout
from hotset.memory.geometry import Geometry


@dataclass(frozen=True, slots=True)
class KvShape:
    """Describes what a token stores: one row per layer, and one index key per index group (none without an indexer)."""

    layers: int
    row: RowLayout
    key_layers: tuple[int, ...] = ()  # first layer of each index group, which has the indexer
    key: RowLayout | None = None
    topk: int = 0

    @property
    def groups(self) -> int:
        return len(self.key_layers)

    def layers_of(self, group: int) -> range:
        """Returns the layers that share this group's selection."""
        end = self.key_layers[group + 1] if group + 1 < self.groups else self.layers
        return range(self.key_layers[group], end)

    def group_of(self, layer: int) -> int:
        """Returns the index group whose selection a layer uses."""
        return bisect_right(self.key_layers, layer) - 1

    @property
    def key_parts(self) -> int:
        """The number of parts into which a page divides its keys of one group.

        Each part lies in a different layer of the group. The smallest group therefore limits the number of parts.
        """
        return min((len(self.layers_of(group)) for group in range(self.groups)), default=0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows and index keys in the host store."""
        keys = self.groups * self.key.stride_bytes if self.key is not None else 0
        return self.layers * self.row.stride_bytes + keys

    def geometry(self, page_rows: int, slots: int = 0) -> Geometry:
        layer_page_bytes = page_rows * self.row.stride_bytes
        keys_per_page = 0
        if self.key is not None:
            keys_per_page = self.key_parts * (layer_page_bytes // self.key.stride_bytes)
            if keys_per_page == 0:
                raise ConfigError(f"--page-rows {page_rows} is too small: a page must hold at least one index key")
        return Geometry(page_rows, self.layers, layer_page_bytes, keys_per_page, slots, self.topk)


class DevicePool:
    """Owns `pages` pages of device memory. The ledger records which request holds a page, and for what.

    Fresh memory is not cleared, because a row is read only after it was written.
    """

    def __init__(self, shape: KvShape, geometry: Geometry, pages: int, device: torch.device) -> None:
        self.shape, self.geometry, self.pages, self.device = shape, geometry, pages, device
        self.bytes = torch.empty(shape.layers, pages, geometry.layer_page_bytes, dtype=torch.uint8, device=device)
        stored = self.bytes.view(shape.row.stored_dtype)
        self.rows = stored.view(shape.layers, pages * geometry.page_rows, shape.row.stored_width)
        self.flat_rows = self.rows.flatten(0, 1)  # row r of layer l has index l * layer_rows + r
        self.row_blocks = stored.view(shape.layers, pages, geometry.page_rows, shape.row.stored_width)
        self.words = self.bytes.view(torch.int32).flatten(1)  # [layers, pages * words_per_page], for map pages
        self.key_blocks: Tensor | None = None
        if shape.key is not None:
            keys = self.bytes.view(shape.key.stored_dtype)
            per_block = geometry.layer_page_bytes // shape.key.stride_bytes
            used = keys[:, :, : per_block * shape.key.stored_width]
            self.key_blocks = used.unflatten(2, (per_block, shape.key.stored_width))  # [layers, pages, keys, width]

    @property
    def layer_rows(self) -> int:
        return self.pages * self.geometry.page_rows

    @property
    def key_parts(self) -> int:
        """The number of parts into which a page divides its keys of one group, each in a different layer."""
        assert self.key_blocks is not None, "this model has no index keys"
        return self.geometry.keys_per_page // self.key_blocks.shape[2]

    def keys_of(self, group: int) -> Tensor:
        """Returns the keys of one index group, [parts, pages, keys, stored width].

        Position p of a context is key p % keys_per_page of the context's key page p // keys_per_page. Each part holds
        consecutive keys of a page.
        """
        assert self.key_blocks is not None, "this model has no index keys"
        first = self.shape.key_layers[group]
        return self.key_blocks[first : first + self.key_parts]

    def words_of(self, group: int) -> Tensor:
        """Returns the map words of one index group, [pages * words_per_page] int32."""
        return self.words[self.shape.key_layers[group]]
