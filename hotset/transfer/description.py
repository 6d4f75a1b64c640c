"""How one end describes itself to another: the engine's own words, and the regions that may be written to."""

import base64
import json
from dataclasses import dataclass

from hotset.base.errors import StartupError, TransferError
from hotset.transfer.api import Memory, Region
from hotset.transfer.regions import Regions

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
            Region(int(address), int(nbytes), Memory(memory), int(device))
            for address, nbytes, memory, device in found["regions"]
        ]
        return Description(engine, Regions(regions), base64.b64decode(found["native"], validate=True))
    except (ValueError, TypeError, KeyError, OverflowError, StartupError) as error:
        raise TransferError(f"the peer's description of its memory makes no sense: {error}") from error
