"""How many pages things take: plain arithmetic that admission, sizing and the pools share. No torch.

Every page of the device pool is the same size, `page_rows` rows in each layer, and may hold any of these:

    rows   `page_rows` rows of a request, in every layer (a resident request's, a hot buffer's slots, a tail)
    keys   `keys_per_page` index keys of a request, for every index group
    maps   words of a tiered request's residency maps, for every index group
    work   the rows of one layer of a context that streams through the device during prefill

One kind of page means one budget: what one use gives up, any other may take, so tiers never lower concurrency.
"""

from dataclasses import dataclass

from hotset.base.units import ceil_div

TAIL_PAGES = 2  # page n of a context lies in tail page n % 2
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one pool and one model."""

    page_rows: int
    layers: int
    part_bytes: int  # of one page in one layer
    keys_per_page: int = 0  # 0: the model has no index keys
    slots: int = 0  # of a hot buffer; 0: no request is ever tiered
    topk: int = 0  # positions that one query row selects

    @property
    def page_bytes(self) -> int:
        return self.layers * self.part_bytes

    @property
    def words_per_page(self) -> int:
        return self.part_bytes // WORD_BYTES

    @property
    def slot_pages(self) -> int:
        return ceil_div(self.slots, self.page_rows)

    def row_pages(self, tokens: int) -> int:
        return ceil_div(tokens, self.page_rows)

    def key_pages(self, tokens: int) -> int:
        return ceil_div(tokens, self.keys_per_page) if self.keys_per_page else 0

    def map_pages(self, tokens: int) -> int:
        """Words: `slots` of position_of, `slots` of last_used, then slot_of, two positions a word."""
        return ceil_div(2 * self.slots + ceil_div(tokens, 2), self.words_per_page)

    def work_pages(self, tokens: int) -> int:
        """A page's layers stand one after another here: they all hold rows of the one layer that streams."""
        return ceil_div(self.row_pages(tokens), self.layers)

    def hot_pages(self, tokens: int) -> int:
        """Slots, tail and maps."""
        return self.slot_pages + TAIL_PAGES + self.map_pages(tokens)

    def resident_pages(self, tokens: int) -> int:
        return self.row_pages(tokens) + self.key_pages(tokens)

    def tiered_pages(self, tokens: int) -> int:
        return self.hot_pages(tokens) + self.key_pages(tokens)

    def streamed_pages(self, tokens: int) -> int:
        """While it is prefilled, with enough in hand to become tiered when that is done."""
        return max(self.work_pages(tokens), self.hot_pages(tokens)) + self.key_pages(tokens)

    def tail_first(self, position: int) -> int:
        """First position that the tail holds when the newest row stands at `position`."""
        return max(0, position // self.page_rows - 1) * self.page_rows
