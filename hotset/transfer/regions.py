"""Registered memory: which region an address lies in."""

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotset.base.errors import StartupError, TransferError
from hotset.transfer.api import MemoryKind, Region, Writes

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


NO_EDGES: NDArray[np.int64] = np.empty(0, np.int64)


def merged(
    writes: Writes, edges_here: NDArray[np.int64] = NO_EDGES, edges_there: NDArray[np.int64] = NO_EDGES
) -> Writes:
    """The same bytes to the same places, in as few writes as there are runs; in the order of the targets.

    Two writes are joined where one goes on where the other ends, here and there. None is joined across an edge, the
    address at which a region begins: neighbours in memory may be registered apart, and no engine writes across that.
    Targets must not overlap, since no engine promises an order among the writes of a list.
    """
    writes = writes[writes[:, 2] > 0]
    if len(writes) < 2:
        return writes
    writes = writes[np.argsort(writes[:, 1], kind="stable")]
    here, there, nbytes = writes.T
    goes_on = (here[1:] == here[:-1] + nbytes[:-1]) & (there[1:] == there[:-1] + nbytes[:-1])
    if len(edges_here) > 1:
        goes_on &= ~np.isin(here[1:], edges_here)
    if len(edges_there) > 1:
        goes_on &= ~np.isin(there[1:], edges_there)
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return np.stack([here[first], there[first], np.add.reduceat(nbytes, first)], axis=1)


def runs_between(writes: Writes, here: Regions, there: Regions) -> Writes | None:
    """`writes`, merged, or None if any of them reads outside `here` or would write outside `there`."""
    for regions, addresses in ((here, writes[:, 0]), (there, writes[:, 1])):
        if (regions.locate(addresses, writes[:, 2]) == OUTSIDE).any():
            return None
    return merged(writes, here.starts, there.starts)


def cut(writes: Writes, longest: int) -> Writes:
    """The same bytes in writes of at most `longest` bytes, in order."""
    nbytes = writes[:, 2]
    counts = -(-nbytes // longest)
    if not len(writes) or counts.max() <= 1:
        return writes
    pieces = np.repeat(writes, counts, axis=0)
    offsets = (np.arange(len(pieces)) - np.repeat(np.cumsum(counts) - counts, counts)) * longest
    pieces[:, :2] += offsets[:, None]
    pieces[:, 2] = np.minimum(longest, pieces[:, 2] - offsets)
    return pieces


VERSION = 1


@dataclass(frozen=True, slots=True)
class Description:
    engine: str
    regions: Regions
    native: bytes  # for the engine alone

    def encode(self) -> bytes:
        regions = [[each.address, each.nbytes, each.memory.value, each.device] for each in self.regions]
        native = base64.b64encode(self.native).decode()
        return json.dumps({"version": VERSION, "engine": self.engine, "regions": regions, "native": native}).encode()


def decode(description: bytes, engine: str) -> Description:
    """TransferError for anything that another version, another engine or nobody at all has written."""
    try:
        found = json.loads(description)
        version, other = found["version"], found["engine"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TransferError("this is no description of a peer's memory") from error
    if (version, other) != (VERSION, engine):
        raise TransferError(f"the peer uses {other} (version {version}), this side {engine} (version {VERSION})")
    try:
        regions = [
            Region(int(address), int(nbytes), MemoryKind(memory), int(device))
            for address, nbytes, memory, device in found["regions"]
        ]
        return Description(engine, Regions(regions), base64.b64decode(found["native"], validate=True))
    except (ValueError, TypeError, KeyError, OverflowError, StartupError) as error:
        raise TransferError(f"the peer's description of its memory makes no sense: {error}") from error
