"""Decides the next actions of the controller: a pure function of the wanted state and of the observed processes.

A process passes through these phases, and is forgotten at the end:

    starting -> ready -> leaving -> stopping -> gone
        |         |
        +---------+--> failed

Routers send no further requests to a process that is leaving. The process is stopped when all routers have confirmed
this. A failed process stays in the list until its replacement may start. That must wait until the memory of the failed
process is free, and so must the end of its supervisor, which has reserved its GPUs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hotset.fleet.cluster.scaling import Load
from hotset.fleet.cluster.spec import Restart, Role

Phase = Literal["starting", "ready", "leaving", "stopping", "gone", "failed"]
Shutdown = Literal["no", "drain", "now"]
STOPPING_ORDER: tuple[Role, ...] = ("router", "decode", "prefill")  # so that requests in flight can finish
UNROUTE_SECONDS = 10.0  # time for routers to confirm that they do not use a process any more
STABLE_SECONDS = 60.0  # after this time, the earlier failures of a ready process do not count


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the application, as the controller knows it."""

    name: str  # like "decode-2"; also the name of its supervisor
    role: Role
    phase: Phase
    since: float  # when the phase began
    failures: int = 0  # failures in a row, of this process and of those that it replaces
    node: str | None = None  # the id of its node; None until Ray has placed it
    url: str | None = None
    error: str = ""  # why it failed
    holds_memory: bool = False  # it, or what it has started, still exists


@dataclass(frozen=True, slots=True)
class Wanted:
    """The state that the application should have. `drained` are ids of nodes that must become empty.

    A process on a drained node leaves when its replacement is ready. If the node is also in `hurried`, it leaves at
    once.
    """

    counts: Mapping[Role, int]
    drained: frozenset[str] = frozenset()
    hurried: frozenset[str] = frozenset()
    shutdown: Shutdown = "no"


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process of a role. `failures` processes that it replaces have failed in a row."""

    role: Role
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Leave:
    """Let routers send no further requests to a process."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Let a process finish its requests and end."""

    name: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove a process that has ended, and its supervisor."""

    name: str


Action = Start | Leave | Stop | Forget


@dataclass(frozen=True, slots=True)
class Report:
    """The state of one process, as its supervisor reports it."""

    node: str = ""  # empty if the supervisor was lost
    pid: int | None = None
    url: str | None = None
    ready: bool = False
    ended: str | None = None  # why the process has ended; None if it runs
    holds_memory: bool = False  # it, or what it has started, still exists
    load: Load = field(default_factory=Load)
    routed: tuple[str, ...] = ()  # of a router: the workers to which it may send requests
    up: tuple[str, ...] = ()  # of a router: the workers in `routed` that have answered it


def observe(member: Member, seen: Report, now: float) -> Member:
    """Returns the member after a report."""
    member = replace(member, node=seen.node or member.node, url=seen.url or member.url, holds_memory=seen.holds_memory)
    if member.phase in ("gone", "failed"):
        return member
    if seen.ended is not None:
        if member.phase in ("leaving", "stopping"):
            return replace(member, phase="gone", since=now)
        was_stable = member.phase == "ready" and now - member.since >= STABLE_SECONDS
        return replace(
            member, phase="failed", since=now, error=seen.ended, failures=0 if was_stable else member.failures
        )
    if seen.ready and member.phase == "starting":
        return replace(member, phase="ready", since=now)
    return member


def backoff_seconds(failures: int, policy: Restart) -> float:
    """Returns how long the replacement of a process must wait, after `failures` earlier failures in a row."""
    return min(policy.max_backoff_seconds, policy.backoff_seconds * 2.0 ** min(failures, 30))


def reconcile(
    wanted: Wanted, members: Sequence[Member], routed: Collection[str], policy: Restart, now: float
) -> list[Action]:
    """Returns the next actions. `routed` are the URLs to which ready routers may still send requests."""
    actions: list[Action] = [
        Forget(member.name) for member in members if member.phase == "gone" and not member.holds_memory
    ]
    for member in members:
        confirmed = member.url not in routed or now - member.since >= UNROUTE_SECONDS
        if member.phase == "leaving" and (confirmed or wanted.shutdown == "now"):
            actions.append(Stop(member.name))
    for role in STOPPING_ORDER:
        of_role = [member for member in members if member.role == role]
        if wanted.shutdown == "no":
            actions += _reconcile_role(role, wanted, of_role, policy, now)
            continue
        actions += [_end(member) for member in of_role if member.phase in ("starting", "ready") or _is_over(member)]
        if of_role and wanted.shutdown == "drain":
            break  # the engines serve until the last router has ended
    return actions


def _reconcile_role(role: Role, wanted: Wanted, members: Sequence[Member], policy: Restart, now: float) -> list[Action]:
    actions: list[Action] = []
    alive = [member for member in members if member.phase in ("starting", "ready")]
    failed = [member for member in members if member.phase == "failed"]
    kept = [member for member in alive if member.node not in wanted.drained]
    count = wanted.counts[role]
    num_ready = sum(member.phase == "ready" for member in kept)
    for member in alive:
        if member in kept:
            continue
        if member.phase == "starting" or member.node in wanted.hurried or num_ready >= count:
            actions.append(_end(member))
    # Processes that serve are removed last. Of these, the newest is removed first.
    excess = len(kept) + len(failed) - count
    removal_order = [*failed, *_newest_first(kept, "starting"), *_newest_first(kept, "ready")]
    removed = removal_order[: max(0, excess)]
    actions += [_end(member) for member in removed if member in alive or _is_over(member)]
    for member in failed:
        waited = now - member.since >= backoff_seconds(member.failures, policy)
        if member not in removed and waited and _is_over(member):
            actions += [Forget(member.name), Start(role, member.failures + 1)]
    actions += [Start(role)] * -min(0, excess)
    return actions


def _newest_first(members: Sequence[Member], phase: Phase) -> list[Member]:
    return sorted((member for member in members if member.phase == phase), key=lambda member: -member.since)


def _is_over(member: Member) -> bool:
    """Returns whether a process has failed and nothing of it is left."""
    return member.phase == "failed" and not member.holds_memory


def _end(member: Member) -> Action:
    """Returns the first step of removing a process."""
    if member.phase == "failed":
        return Forget(member.name)
    return Leave(member.name) if member.phase == "ready" else Stop(member.name)
