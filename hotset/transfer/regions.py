"""Registered memory: which region an address lies in."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from hotset.base.errors import StartupError
from hotset.transfer.api import Region

OUTSIDE = -1


class Regions:
    """Regions in the order of their addresses; none overlaps another. Grows only, by replacing its arrays as a whole,
    so that other threads may read while one adds."""

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        self._regions: tuple[Region, ...] = ()
        self.starts: NDArray[np.int64] = np.empty(0, np.int64)
        for region in regions:
            self.add(region)

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    def __getitem__(self, at: int) -> Region:
        return self._regions[at]

    def add(self, region: Region) -> None:
        """StartupError if it is empty or overlaps another."""
        if region.address <= 0 or region.nbytes <= 0:
            raise StartupError(f"a region of {region.nbytes} bytes at address {region.address} cannot be registered")
        for other in self._regions:
            if region.address < other.address + other.nbytes and other.address < region.address + region.nbytes:
                raise StartupError(
                    f"a region of {region.nbytes} bytes at {region.address:#x} overlaps the registered one of "
                    f"{other.nbytes} bytes at {other.address:#x}"
                )
        regions = tuple(sorted((*self._regions, region), key=lambda each: each.address))
        starts = np.array([each.address for each in regions], np.int64)
        self._regions, self.starts = regions, starts

    def locate(self, addresses: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each span the number of the region that holds all of it, or OUTSIDE."""
        if not len(self):
            return np.full(len(addresses), OUTSIDE, np.int64)
        ends = np.array([each.address + each.nbytes for each in self._regions], np.int64)
        at = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        # Compared as lengths: address + bytes of a senseless write could overflow.
        held = (at >= 0) & (nbytes >= 0) & (addresses <= ends[at]) & (nbytes <= ends[at] - addresses)
        return np.where(held, at, OUTSIDE)
