"""What swap-in reads and returns: where the rows of every seat are, and the copies that one step needs."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SeatTables:
    """Where every seat's rows are, on the device. A seat is a running request's fixed place in the worker's tensors.

    Entries that a seat does not use (device pages of a tiered seat, slots of a resident one) may hold anything. Every
    seat's part of a table is as long as its longest context needs, and lies in one piece.

    The maps of a tiered seat are a space of int32 words cut into `map_pages`: word w is
    `words[map_pages[w // words_per_page] * words_per_page + w % words_per_page]`.
        [0, slots)            position_of[slot], EMPTY: the slot is empty
        [slots, 2 * slots)    last_used[slot], the stamp of the last step that read it, -1: none
        [2 * slots, ...)      slot_of[position], int16, two to a word in memory order, EMPTY: not in a slot
    """

    row_pages: Tensor  # [seats, n] int64: of a resident seat, the device page of each page of the context
    host_pages: Tensor  # [seats, n] int64: of a tiered seat, the host page of each page of the context
    slot_pages: Tensor  # [seats, m] int64: device pages that hold the slots, `page_rows` in each, in order
    tail_pages: Tensor  # [seats, 2] int64: page n of the context lies in tail page n % 2
    map_pages: Tensor  # [seats, j] int64: pages of the map words, in order
    tiered: Tensor  # [seats] bool
    page_rows: int
    slots: int  # of each tiered seat; at least k, not always a power of two or a multiple of `page_rows`


@dataclass(frozen=True, slots=True)
class Copies:
    """Rows to bring from the host to the device: the first `counts` entries of each batch row's list.

    What the lists hold past that may be anything. No device row is named twice.
    """

    host_rows: Tensor  # [batch, n] int64
    device_rows: Tensor  # [batch, n] int64
    counts: Tensor  # [batch] int32


@dataclass(frozen=True, slots=True)
class Swap:
    """What attention will read, and the copies that must come first, in every layer of the index group."""

    rows: Tensor  # [batch, k] int64: device row of each position once the copies are done; EMPTY-padded
    copies: Copies  # lists of k entries: what is missing, once each, in the order of the positions
