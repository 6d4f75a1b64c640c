"""Page arithmetic that admission, sizing and the pools share. It does not use torch.

Every page of the device pool has the same size, `page_rows` rows in each layer, and has one of these uses:

    rows   `page_rows` rows of a request in every layer: rows of a resident request, slots, or a tail page
    keys   `keys_per_page` index keys of a request, for every index group
    maps   words of a tiered request's residency maps, for every index group
    work   the rows of one layer of a context that streams through the device during prefill

A page that is freed from one use can be granted for any other. Therefore, enabling tiers never lowers the number of
requests that fit.
"""

from dataclasses import dataclass

from hotset.base.units import ceil_div

TAIL_PAGES = 2  # the newest two pages of a context: page n is in tail page n % TAIL_PAGES
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of one model's pages."""

    page_rows: int
    layers: int
    layer_page_bytes: int  # bytes of one page in one layer
    keys_per_page: int = 0  # 0 if the model has no index keys
    slots: int = 0  # slots of a hot buffer; 0 if requests cannot be tiered
    topk: int = 0  # positions that one token selects

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_page_bytes

    @property
    def words_per_page(self) -> int:
        return self.layer_page_bytes // WORD_BYTES

    @property
    def slot_pages(self) -> int:
        return ceil_div(self.slots, self.page_rows)

    def row_pages(self, tokens: int) -> int:
        return ceil_div(tokens, self.page_rows)

    def key_pages(self, tokens: int) -> int:
        return ceil_div(tokens, self.keys_per_page) if self.keys_per_page else 0

    def map_pages(self, tokens: int) -> int:
        """Pages for `slots` words of position_of, as many of last_used, and slot_of with two positions per word."""
        return ceil_div(2 * self.slots + ceil_div(tokens, 2), self.words_per_page)

    def work_pages(self, tokens: int) -> int:
        """Pages of a workspace, which uses all `layers` layers of its pages for the rows of one layer of the model."""
        return ceil_div(self.row_pages(tokens), self.layers)

    def hot_pages(self, tokens: int) -> int:
        """Pages of slots, tail and maps."""
        return self.slot_pages + TAIL_PAGES + self.map_pages(tokens)

    def resident_pages(self, tokens: int) -> int:
        return self.row_pages(tokens) + self.key_pages(tokens)

    def tiered_pages(self, tokens: int) -> int:
        return self.hot_pages(tokens) + self.key_pages(tokens)

    def streamed_pages(self, tokens: int) -> int:
        """Pages of a streamed prefill. They suffice for the request to become tiered at the end of the prefill."""
        return max(self.work_pages(tokens), self.hot_pages(tokens)) + self.key_pages(tokens)

    def tail_first(self, position: int) -> int:
        """Returns the first position that the tail holds when the newest row is at `position`."""
        return max(0, position // self.page_rows - 1) * self.page_rows
