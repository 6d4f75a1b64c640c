"""The pages of every seat: as tensors on the device, and as lists and merged runs on the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.kernels.device_copies import list_to_device
from hotset.kernels.rows import Run
from hotset.memory.geometry import Geometry
from hotset.memory.pages import extend_runs


class PageTables:
    """Page tables of up to `seats` requests, each of at most `context` tokens.

    A seat is a running request's fixed index in the worker's tensors. Numbers are written with `fill_`, because
    assigning a Python number to an element makes a copy that waits for the device.
    """

    def __init__(self, seats: int, context: int, geometry: Geometry, device: torch.device) -> None:
        def table(pages: int) -> Tensor:
            return torch.full((seats, pages), EMPTY, dtype=torch.int64, device=device)

        self.geometry = geometry
        self.device = device
        pages = geometry.row_pages(context) + 1
        self.rows = table(pages)  # device page of each page of a resident context
        self.host = table(pages)  # host page of each page of the context
        self.keys = table(geometry.key_pages(context))
        self.slots = table(geometry.slot_pages)
        self.tail = table(geometry.tail_pages)
        self.maps = table(geometry.map_pages(context) if geometry.slots else 0)
        self.tiered = torch.zeros(seats, dtype=torch.bool, device=device)
        self.row_runs: list[list[Run]] = [[] for _ in range(seats)]
        self.key_runs: list[list[Run]] = [[] for _ in range(seats)]
        self.row_pages: list[list[int]] = [[] for _ in range(seats)]
        self.key_pages: list[list[int]] = [[] for _ in range(seats)]
        self.shared_keys = [0] * seats  # how many of its first `key_pages` a seat shares with others and only reads
        self.host_pages: list[list[int]] = [[] for _ in range(seats)]
        self.tail_pages: list[tuple[int, ...]] = [() for _ in range(seats)]
        self.work_pages: list[list[int]] = [[] for _ in range(seats)]  # workspaces of seats with streamed prefill
        self.tiered_seats: set[int] = set()  # the same information as `tiered`, on the host

    def clear(self, seat: int) -> None:
        """Removes the pages of a seat from the tables before a new request uses it."""
        for table in (self.host, self.keys, self.slots, self.tail, self.maps):
            table[seat].fill_(EMPTY)
        self.set_tiered(seat, False)
        self.drop_rows(seat)
        self.key_runs[seat], self.key_pages[seat], self.shared_keys[seat] = [], [], 0
        self.host_pages[seat], self.work_pages[seat], self.tail_pages[seat] = [], [], ()

    def set_tiered(self, seat: int, tiered: bool) -> None:
        self.tiered[seat].fill_(tiered)
        (self.tiered_seats.add if tiered else self.tiered_seats.discard)(seat)

    def set_tail(self, seat: int, pages: Sequence[int]) -> None:
        self.put(self.tail, seat, 0, pages)
        self.tail_pages[seat] = tuple(pages)

    def put(self, table: Tensor, seat: int, first: int, pages: Sequence[int]) -> None:
        if len(pages) == 1:  # the common case in decode steps; `fill_` is faster than a copy
            table[seat, first].fill_(pages[0])
        else:
            table[seat, first : first + len(pages)] = list_to_device(pages, torch.int64, self.device)

    def extend_rows(self, seat: int, first: int, pages: Sequence[int]) -> None:
        """Appends `pages` to the seat's row pages; `first` is the index of the first of them."""
        self.put(self.rows, seat, first, pages)
        extend_runs(self.row_runs[seat], pages)
        self.row_pages[seat] += pages

    def drop_rows(self, seat: int) -> None:
        """Removes the row pages of a seat that is not resident any more."""
        self.rows[seat].fill_(EMPTY)
        self.row_runs[seat], self.row_pages[seat] = [], []

    def extend_keys(self, seat: int, first: int, pages: Sequence[int]) -> None:
        self.put(self.keys, seat, first, pages)
        extend_runs(self.key_runs[seat], pages)
        self.key_pages[seat] += pages

    def extend_host(self, seat: int, first: int, pages: Sequence[int]) -> None:
        self.put(self.host, seat, first, pages)
        self.host_pages[seat] += pages

    def rows_at(self, seats: Tensor | int, positions: Tensor) -> Tensor:
        """Returns the device rows, within a layer, of `positions` in resident contexts. `seats` is broadcast."""
        page_rows = self.geometry.page_rows
        return self.rows[seats, positions // page_rows] * page_rows + positions % page_rows

    def tail_at(self, seats: Tensor | int, positions: Tensor) -> Tensor:
        """Returns the device rows, within a layer, of `positions` in the tails of tiered contexts."""
        page_rows = self.geometry.page_rows
        return self.tail[seats, positions // page_rows % self.geometry.tail_pages] * page_rows + positions % page_rows

    def host_at(self, seats: Tensor | int, positions: Tensor) -> Tensor:
        """Returns the host rows, within a layer, of `positions`."""
        page_rows = self.geometry.page_rows
        return self.host[seats, positions // page_rows] * page_rows + positions % page_rows
