"""The device pool: pages of bytes, `[layer][page]`, that hold rows, index keys, maps or a workspace."""

from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

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

    def key_part_layers(self, group: int) -> range:
        """Returns the layers of a key page that are the parts of this index group.

        Layers are numbered through all key pages of a context: layer l of page n is number n * layers + l. Block n of
        group g is in layer number n * groups + g. Every group therefore uses each d-th layer of a page, where d is the
        greatest common divisor of `groups` and `layers`. Numbered through all pages, these layers are the group's
        parts, and block n is in part n * key_step + key_first_part.
        """
        divisor = gcd(self.groups, self.layers)
        return range(group % divisor, self.layers, divisor)

    @property
    def key_step(self) -> int:
        return self.groups // gcd(self.groups, self.layers)

    def key_first_part(self, group: int) -> int:
        return group // gcd(self.groups, self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows and index keys in the host store."""
        keys = self.groups * self.key.stride_bytes if self.key is not None else 0
        return self.layers * self.row.stride_bytes + keys

    def geometry(self, page_rows: int, slots: int = 0) -> Geometry:
        layer_page_bytes = page_rows * self.row.stride_bytes
        if self.key is None:
            return Geometry(page_rows, self.layers, layer_page_bytes, slots=slots, topk=self.topk)
        keys_per_block = layer_page_bytes // self.key.stride_bytes
        if keys_per_block == 0:
            raise ConfigError(f"--page-rows {page_rows} is too small: a page must hold at least one index key")
        return Geometry(
            page_rows,
            self.layers,
            layer_page_bytes,
            keys_per_block=keys_per_block,
            slots=slots,
            topk=self.topk,
            key_groups=self.groups,
            blocks_per_page=self.layers,
            max_blocks_of_group=Fraction(self.layers, self.groups),
        )


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
            keys, per_block = self.bytes.view(shape.key.stored_dtype), geometry.keys_per_block
            used = keys[:, :, : per_block * shape.key.stored_width]
            self.key_blocks = used.unflatten(2, (per_block, shape.key.stored_width))  # [layers, pages, keys, width]

    @property
    def layer_rows(self) -> int:
        return self.pages * self.geometry.page_rows

    def keys_of(self, group: int) -> Tensor:
        """Returns the layers of all pages that can hold key blocks of one index group, [parts, pages, keys, width].

        Position p of a context is key p % keys_per_block of block p // keys_per_block.
        """
        assert self.key_blocks is not None, "this model has no index keys"
        layers = self.shape.key_part_layers(group)
        return self.key_blocks[layers.start :: layers.step]

    def words_of(self, group: int) -> Tensor:
        """Returns the map words of one index group, [pages * words_per_page] int32."""
        return self.words[self.shape.key_layers[group]]
