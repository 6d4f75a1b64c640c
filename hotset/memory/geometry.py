"""Page arithmetic that admission, sizing and the pools share. It does not use torch.

Every page of the device pool has the same size, `page_rows` rows in each layer, and has one of these uses:

    rows   `page_rows` rows of a request in every layer: rows of a resident request, slots, or a tail page
    keys   one block of index keys in each layer: `keys_per_block` consecutive index keys of one index group
    maps   words of a tiered request's residency maps, for every index group
    work   the rows of one layer of a context that streams through the device during prefill

A page that is freed from one use can be granted for any other. Therefore, enabling tiers never lowers the number of
requests that fit.

The key blocks of all index groups take turns: a context has block 0 of every group, then block 1 of every group, and so
on, and each block takes the next layer of its key pages. Key pages are therefore filled completely for any number of
groups, however many layers share an indexer: index keys take `groups / layers` pages for every `keys_per_block` tokens.
"""

from dataclasses import dataclass
from fractions import Fraction

from hotset.base.errors import InternalError
from hotset.base.units import ceil_div

TAIL_PAGES = 2  # the page of the newest final row and the page before it are always in the tail
WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of one model's pages."""

    page_rows: int
    layers: int
    layer_page_bytes: int  # bytes of one page in one layer
    keys_per_block: int = 0  # index keys of one group in one layer of a page; 0 if the model has no index keys
    slots: int = 0  # slots of a hot buffer; 0 if requests cannot be tiered
    topk: int = 0  # positions that one token selects
    max_drafts: int = 0  # drafted tokens of a request that one step can verify after its newest token
    max_unverified: int = 0  # drafts of a request that steps in flight still verify when its next step is submitted
    key_groups: int = 1  # index groups, each of which stores a key per token
    blocks_per_page: int = 1  # key blocks in a page: one in each layer
    # How many blocks of one index group are in a page: the ratio blocks_per_page / key_groups, which can differ between
    # workers. This is the largest ratio; `key_groups` and `blocks_per_page` are those of the worker with the smallest.
    max_blocks_of_group: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if self.max_blocks_of_group < Fraction(self.blocks_per_page, self.key_groups):
            raise InternalError("max_blocks_of_group is smaller than blocks_per_page / key_groups")

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_page_bytes

    @property
    def words_per_page(self) -> int:
        return self.layer_page_bytes // WORD_BYTES

    @property
    def tail_pages(self) -> int:
        """The number of pages of a tail. Page n of a context is in tail page n % tail_pages.

        A step begins between p and p + `max_unverified`, and computes up to `max_drafts` drafted tokens after its first
        one. If all of these are right, the MTP layer then writes rows of up to `max_drafts - 1` further drafts. All
        drafts can be rejected, so their rows must not overwrite the page of p and the page before it.
        """
        return TAIL_PAGES + ceil_div(self.max_unverified + max(0, 2 * self.max_drafts - 1), self.page_rows)

    @property
    def slots_per_step(self) -> int:
        """The most slots of a tiered request that one step uses.

        Drafting after the step uses fewer slots, and may evict the slots that the step used.
        """
        return self.topk * (1 + self.max_drafts)

    @property
    def slot_pages(self) -> int:
        return ceil_div(self.slots, self.page_rows)

    def row_pages(self, tokens: int) -> int:
        return ceil_div(tokens, self.page_rows)

    def key_pages(self, tokens: int) -> int:
        if not self.keys_per_block:
            return 0
        return ceil_div(ceil_div(tokens, self.keys_per_block) * self.key_groups, self.blocks_per_page)

    def key_pages_before(self, token: int) -> int:
        """Returns how many of a context's key pages hold only index keys of tokens before `token`."""
        return token // self.keys_per_block * self.key_groups // self.blocks_per_page if self.keys_per_block else 0

    def key_capacity(self, pages: int) -> int:
        """Returns how many tokens have their index keys in `pages` pages."""
        return pages * self.blocks_per_page // self.key_groups * self.keys_per_block

    def whole_key_pages(self, tokens: int) -> int:
        """Returns how many key pages hold only index keys of the first `tokens` tokens, and have no room for more."""
        if not self.keys_per_block:
            return 0
        blocks, ratio = tokens // self.keys_per_block, self.max_blocks_of_group
        return blocks * ratio.denominator // ratio.numerator  # faster than a division by a Fraction

    def key_page_end(self, number: int) -> int:
        """Returns how many tokens have index keys in the key pages up to page `number`, if all of these are full."""
        ratio = self.max_blocks_of_group
        return ceil_div((number + 1) * ratio.numerator, ratio.denominator) * self.keys_per_block

    def map_pages(self, tokens: int) -> int:
        """Returns the pages for `slots` words of position_of, as many of last_used, and slot_of with two per word."""
        return ceil_div(2 * self.slots + ceil_div(tokens, 2), self.words_per_page)

    def work_pages(self, tokens: int) -> int:
        """Returns the pages of a workspace. It uses all layers of its pages for the rows of one layer of the model."""
        return ceil_div(self.row_pages(tokens), self.layers)

    def hot_pages(self, tokens: int) -> int:
        """Returns the pages of slots, tail and maps."""
        return self.slot_pages + self.tail_pages + self.map_pages(tokens)

    def resident_pages(self, tokens: int) -> int:
        return self.row_pages(tokens) + self.key_pages(tokens)

    def tiered_pages(self, tokens: int) -> int:
        return self.hot_pages(tokens) + self.key_pages(tokens)

    def streamed_pages(self, tokens: int) -> int:
        """Returns the pages of a streamed prefill. They suffice for the request to become tiered when it ends."""
        return max(self.work_pages(tokens), self.hot_pages(tokens)) + self.key_pages(tokens)

    def max_row_pages(self, pages: int) -> int:
        """Returns an upper bound of the row pages that fit into `pages` pages together with their index keys."""
        if not self.keys_per_block:
            return pages
        # The most row pages per key page. The ratio repeats after `key_groups` pages, which hold whole blocks.
        ratio = max(
            Fraction(self.row_pages(self.key_capacity(count)), count) for count in range(1, self.key_groups + 1)
        )
        return int(pages * ratio / (ratio + 1))

    def tail_first(self, position: int) -> int:
        """Returns the first position that is read from the tail in a step whose first token is at `position`."""
        return max(0, position // self.page_rows - 1) * self.page_rows
