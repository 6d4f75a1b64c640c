"""The inputs and results of swap-in: tables with the location of each seat's rows, and the copies of one step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SeatTables:
    """The location of every seat's rows, in device tensors. A seat is the fixed index of a running request.

    Entries that a seat does not use (row pages of a tiered seat, slots of a resident one) are undefined. The entries
    of one seat are adjacent, and there are enough for its longest possible context.

    The maps of a tiered seat are a sequence of int32 words, stored in its `map_pages`: word w is
    `words[map_pages[w // words_per_page] * words_per_page + w % words_per_page]`.
        [0, slots)            position_of[slot]; EMPTY: the slot is empty
        [slots, 2 * slots)    last_used[slot]: the stamp of the last step that used the slot; -1: none
        [2 * slots, ...)      slot_of[position]: int16, two per word in memory order; EMPTY: not in a slot
    """

    row_pages: Tensor  # [seats, n] int64: the device page of each page of the context, for resident seats
    host_pages: Tensor  # [seats, n] int64: the host page of each page of the context, for tiered seats
    slot_pages: Tensor  # [seats, m] int64: the device pages with the slots in order, `page_rows` per page
    tail_pages: Tensor  # [seats, t] int64: page n of the context is in tail page n % t; t is at least 2
    map_pages: Tensor  # [seats, j] int64: pages of the map words, in order
    tiered: Tensor  # [seats] bool
    page_rows: int
    slots: int  # per tiered seat; at least k, not necessarily a power of two or a multiple of `page_rows`


@dataclass(frozen=True, slots=True)
class RowCopies:
    """The rows to copy from the host to the device: the first `counts` entries of each query's list.

    Later entries are undefined. All listed device rows are distinct.
    """

    host_rows: Tensor  # [batch, n] int64
    device_rows: Tensor  # [batch, n] int64
    counts: Tensor  # [batch] int32


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """The device rows that attention will read, and the copies that each layer of the index group needs first."""

    rows: Tensor  # [batch, k] int64: the device row of each position after the copies; EMPTY-padded
    copies: RowCopies  # lists of k entries: every missing row once, in the order of first occurrence in `positions`
