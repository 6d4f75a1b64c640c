"""Fewer, longer writes: engines are paid by the write."""

import numpy as np
from numpy.typing import NDArray

from hotset.transfer.api import Writes
from hotset.transfer.regions import OUTSIDE, Regions

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
