"""Where a request's rows are, and which changes there are: one table."""

from enum import Enum


class Residence(Enum):
    ABSENT = "absent"  # nowhere: not admitted, or everything was given back
    RESIDENT = "resident"  # every row is on the device; full pages are on the host as well
    STREAMED = "streamed"  # being prefilled with its rows on the host; each layer passes through a workspace
    TIERED = "tiered"  # rows on the host; slots and tail on the device
    PARKED = "parked"  # rows and index keys on the host only
    LANDING = "landing"  # rows and index keys come from another process into pages held for them; nobody reads them yet


NEXT: dict[Residence, frozenset[Residence]] = {
    Residence.ABSENT: frozenset({Residence.RESIDENT, Residence.STREAMED, Residence.LANDING}),  # admit, reserve
    Residence.RESIDENT: frozenset({Residence.TIERED, Residence.PARKED, Residence.ABSENT}),  # demote, park, release
    Residence.STREAMED: frozenset({Residence.TIERED, Residence.PARKED, Residence.ABSENT}),  # ready, park, release
    Residence.TIERED: frozenset({Residence.RESIDENT, Residence.PARKED, Residence.ABSENT}),  # promote, park, release
    Residence.PARKED: frozenset({Residence.RESIDENT, Residence.STREAMED, Residence.TIERED, Residence.ABSENT}),  # resume
    Residence.LANDING: frozenset({Residence.RESIDENT, Residence.TIERED, Residence.ABSENT}),  # land, release
}
