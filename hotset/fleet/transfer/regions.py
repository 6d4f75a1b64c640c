"""Registered memory regions: lookup by address, merging and checking of writes, and the description for peers."""

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotset.base.errors import StartupError, TransferError
from hotset.fleet.transfer.api import MemoryKind, Region, Writes

OUTSIDE = -1  # index for a span that no single region contains
NO_EDGES: NDArray[np.int64] = np.empty(0, np.int64)
VERSION = 1  # of the description


@dataclass(frozen=True, slots=True)
class _Table:
    regions: tuple[Region, ...]  # sorted by address
    starts: NDArray[np.int64]  # address of each region
    ends: NDArray[np.int64]


class Regions:
    """Regions sorted by address, without overlaps. Regions are only added, never removed.

    `add` replaces the table as a whole instead of changing it, so other threads may iterate and call `locate` at the
    same time.
    """

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        self._table = _Table((), NO_EDGES, NO_EDGES)
        for region in regions:
            self.add(region)

    @property
    def starts(self) -> NDArray[np.int64]:
        """The address of each region."""
        return self._table.starts

    def __iter__(self) -> Iterator[Region]:
        return iter(self._table.regions)

    def __len__(self) -> int:
        return len(self._table.regions)

    def __getitem__(self, index: int) -> Region:
        return self._table.regions[index]

    def add(self, region: Region) -> None:
        """Adds a region. Raises StartupError if it is empty, has no valid address, or overlaps another."""
        if region.address <= 0 or region.nbytes <= 0:
            raise StartupError(f"a region of {region.nbytes} bytes at address {region.address} cannot be registered")
        for known in self._table.regions:
            if region.address < known.address + known.nbytes and known.address < region.address + region.nbytes:
                raise StartupError(
                    f"a region of {region.nbytes} bytes at {region.address:#x} overlaps the registered one of "
                    f"{known.nbytes} bytes at {known.address:#x}"
                )
        regions = tuple(sorted((*self._table.regions, region), key=lambda entry: entry.address))
        starts = np.array([entry.address for entry in regions], np.int64)
        ends = np.array([entry.address + entry.nbytes for entry in regions], np.int64)
        self._table = _Table(regions, starts, ends)

    def locate(self, addresses: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns, for each span, the index of the region that contains all of it, or OUTSIDE."""
        table = self._table
        if not table.regions:
            return np.full(len(addresses), OUTSIDE, np.int64)
        ends = table.ends
        index = np.searchsorted(table.starts, addresses, side="right").astype(np.int64) - 1
        # `addresses + nbytes` of an invalid write could overflow, so lengths are compared instead.
        inside = (index >= 0) & (nbytes >= 0) & (addresses <= ends[index]) & (nbytes <= ends[index] - addresses)
        return np.where(inside, index, OUTSIDE)


def merge_writes(
    writes: Writes, local_edges: NDArray[np.int64] = NO_EDGES, remote_edges: NDArray[np.int64] = NO_EDGES
) -> Writes:
    """Merges writes into as few as possible that write the same bytes, sorted by target address.

    A transfer engine has a fixed cost per write. Two writes are merged if one continues the other on both sides, but
    never across an edge, an address at which a region begins, because one write cannot span two registered regions.
    The targets of the writes must not overlap, because no engine guarantees an order within a list.
    """
    writes = writes[writes[:, 2] > 0]
    if len(writes) < 2:
        return writes
    writes = writes[np.argsort(writes[:, 1], kind="stable")]
    local, remote, nbytes = writes.T
    continues = (local[1:] == local[:-1] + nbytes[:-1]) & (remote[1:] == remote[:-1] + nbytes[:-1])
    for addresses, edges in ((local[1:], local_edges), (remote[1:], remote_edges)):
        if len(edges) > 1:
            continues[continues] = ~np.isin(addresses[continues], edges)
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    return np.stack([local[first], remote[first], np.add.reduceat(nbytes, first)], axis=1)


def merge_registered(writes: Writes, local: Regions, remote: Regions) -> Writes | None:
    """Returns the merged writes, or None if one of them is not inside a region on both sides."""
    for regions, addresses in ((local, writes[:, 0]), (remote, writes[:, 1])):
        if (regions.locate(addresses, writes[:, 2]) == OUTSIDE).any():
            return None
    return merge_writes(writes, local.starts, remote.starts)


def split_writes(writes: Writes, max_nbytes: int) -> Writes:
    """Splits writes that are longer than `max_nbytes` bytes. Keeps the order."""
    nbytes = writes[:, 2]
    counts = -(-nbytes // max_nbytes)
    if not len(writes) or counts.max() <= 1:
        return writes
    split = np.repeat(writes, counts, axis=0)
    offsets = (np.arange(len(split)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_nbytes
    split[:, :2] += offsets[:, None]
    split[:, 2] = np.minimum(max_nbytes, split[:, 2] - offsets)
    return split


@dataclass(frozen=True, slots=True)
class Description:
    """The data that an endpoint sends to a peer so that the peer can connect."""

    engine: str
    regions: Regions
    native: bytes  # interpreted only by the engine

    def encode(self) -> bytes:
        regions = [[region.address, region.nbytes, region.memory.value, region.device] for region in self.regions]
        native = base64.b64encode(self.native).decode()
        return json.dumps({"version": VERSION, "engine": self.engine, "regions": regions, "native": native}).encode()


def decode_description(description: bytes, engine: str) -> Description:
    """Parses a description. Raises TransferError if it is malformed, or from another version or another engine."""
    try:
        fields = json.loads(description)
        version, peer_engine = fields["version"], fields["engine"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TransferError("the peer's description of its memory cannot be parsed") from error
    if (version, peer_engine) != (VERSION, engine):
        raise TransferError(
            f"the peer uses {peer_engine} (version {version}), but this worker uses {engine} (version {VERSION})"
        )
    try:
        regions = [
            Region(int(address), int(nbytes), MemoryKind(memory), int(device))
            for address, nbytes, memory, device in fields["regions"]
        ]
        return Description(engine, Regions(regions), base64.b64decode(fields["native"], validate=True))
    except (ValueError, TypeError, KeyError, OverflowError, StartupError) as error:
        raise TransferError(f"the peer's description of its memory is invalid: {error}") from error
