"""Decisions of the controller: a simulated cluster in which anything may fail ends in the wanted state."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hotset.fleet.cluster.application import is_complete
from hotset.fleet.cluster.reconcile import (
    UNROUTE_SECONDS,
    Forget,
    Leave,
    Member,
    Report,
    Start,
    Stop,
    Wanted,
    backoff_seconds,
    observe,
    reconcile,
)
from hotset.fleet.cluster.spec import Restart, Role

ROLES: tuple[Role, ...] = ("prefill", "decode", "router")
NODES = ("n1", "n2", "n3")
POLICY = Restart()


def member(name: str, phase: Any, since: float = 0.0, **fields: Any) -> Member:
    return Member(name, fields.pop("role", "decode"), phase, since, url=f"http://{name}", **fields)


def decide(members: list[Member], count: int, now: float = 100.0, routed: Any = (), **wanted: Any) -> list[Any]:
    counts: dict[Role, int] = {"prefill": 0, "decode": count, "router": 0}
    return reconcile(Wanted(counts, **wanted), members, routed, POLICY, now)


def test_missing_processes_are_started() -> None:
    assert decide([member("a", "ready")], 3) == [Start("decode"), Start("decode")]


def test_processes_that_serve_are_removed_last_and_the_newest_first() -> None:
    members = [member("old", "ready", 1.0), member("new", "ready", 2.0), member("s", "starting"), member("f", "failed")]
    assert decide(members, 3, now=0.5) == [Forget("f")]
    assert decide(members, 2, now=0.5) == [Forget("f"), Stop("s")]
    assert decide(members, 1, now=0.5) == [Forget("f"), Stop("s"), Leave("new")]


def test_a_process_is_replaced_only_when_the_memory_of_the_failed_one_is_free() -> None:
    running = member("a", "ready", 10.0)
    failed = observe(running, Report(node="n1", ended="killed", holds_memory=True), 20.0)
    assert failed.phase == "failed" and failed.error == "killed"
    assert decide([failed], 1, now=1000.0) == [], "its memory is not free, however long it takes"
    assert decide([failed], 0, now=1000.0) == [], "its supervisor keeps the GPUs reserved"
    assert decide([failed], 1, now=1000.0, shutdown="now") == []
    free = observe(failed, Report(node="n1", ended="killed"), 30.0)
    assert free.since == failed.since, "the time to wait began with the failure"
    assert decide([free], 1, now=1000.0) == [Forget("a"), Start("decode", 1)]
    assert decide([free], 0, now=1000.0) == [Forget("a")]
    assert decide([free], 1, now=1000.0, shutdown="now") == [Forget("a")]


def test_a_process_that_was_stopped_is_forgotten_only_when_its_memory_is_free() -> None:
    gone = observe(member("a", "stopping", 10.0), Report(node="n1", ended="stopped", holds_memory=True), 20.0)
    assert gone.phase == "gone" and decide([gone], 0) == []
    assert decide([observe(gone, Report(node="n1", ended="stopped"), 30.0)], 0) == [Forget("a")]


def test_a_process_is_stopped_when_no_router_uses_it_any_more() -> None:
    leaving = [member("a", "leaving", 100.0), member("b", "ready")]
    assert decide(leaving, 1, routed={"http://a"}) == []
    assert decide(leaving, 1, routed={"http://b"}) == [Stop("a")]
    assert decide(leaving, 1, now=100 + UNROUTE_SECONDS, routed={"http://a"}) == [Stop("a")], "a router may hang"


def test_a_node_is_drained_when_replacements_are_ready() -> None:
    drained = {"drained": frozenset({"n1"})}
    old = member("old", "ready", node="n1")
    assert decide([old], 1, **drained) == [Start("decode")]
    assert decide([old, member("new", "starting", node="n2")], 1, **drained) == []
    assert decide([old, member("new", "ready", node="n2")], 1, **drained) == [Leave("old")]
    assert decide([member("s", "starting", node="n1")], 1, **drained) == [Stop("s"), Start("decode")]
    assert decide([old], 1, **drained, hurried=frozenset({"n1"})) == [Leave("old"), Start("decode")]


def test_a_failed_process_is_replaced_after_a_delay_that_grows() -> None:
    delays = []
    for failures in range(10):
        failed = member("a", "failed", 0.0, failures=failures)
        delay = next(second / 2 for second in range(1000) if decide([failed], 1, now=second / 2))
        assert decide([failed], 1, now=delay) == [Forget("a"), Start("decode", failures + 1)]
        delays.append(delay)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_failures_are_forgotten_after_a_stable_time() -> None:
    ready = member("a", "ready", 0.0, failures=5)
    assert observe(ready, Report(ended="x"), 10.0).failures == 5
    assert observe(ready, Report(ended="x"), 60.0).failures == 0


def test_a_shutdown_ends_routers_then_decode_then_prefill() -> None:
    members = [member("p", "ready", role="prefill"), member("d", "ready"), member("r", "ready", role="router")]
    assert decide(members, 1, shutdown="drain") == [Leave("r")]
    stopping = [*members[:2], member("r", "stopping", role="router")]
    assert decide(stopping, 1, shutdown="drain") == []
    assert decide(members[:2], 1, shutdown="drain") == [Leave("d")]
    assert decide(members[:1], 1, shutdown="drain") == [Leave("p")]
    assert sorted(map(str, decide(members, 1, shutdown="now"))) == sorted(map(str, map(Leave, "pdr")))
    failed = [member("f", "failed"), member("s", "starting"), member("g", "gone")]
    assert decide(failed, 1, shutdown="drain") == [Forget("g"), Forget("f"), Stop("s")]


def status_of(role: str, phase: str = "ready", up: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"role": role, "phase": phase, "url": f"http://{role}", "up": up}


def test_an_application_is_complete_if_all_are_ready_and_every_router_has_reached_all_engines() -> None:
    engines = ("http://prefill", "http://decode")
    ready = [status_of("prefill"), status_of("decode"), status_of("router", up=engines)]
    counts = {"prefill": 1, "decode": 1, "router": 1}
    assert is_complete({"members": ready, "counts": counts})
    for members in (
        ready[:2],
        [*ready, status_of("decode")],
        [ready[0], status_of("decode", "starting"), ready[2]],
        [*ready[:2], status_of("router", up=engines[:1])],
    ):
        assert not is_complete({"members": members, "counts": counts})
    assert not is_complete({"members": [*ready, status_of("router")], "counts": counts | {"router": 2}})


class SimulatedCluster(RuleBasedStateMachine):
    """Processes start, fail and end at random, nodes are drained, and numbers change. The decisions are carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.members: dict[str, Member] = {}
        self.counts: dict[Role, int] = dict.fromkeys(ROLES, 1)
        self.drained: set[str] = set()
        self.routed: set[str] = set()
        self.num_started = 0

    @initialize(counts=st.fixed_dictionaries({role: st.integers(1, 4) for role in ROLES}))
    def begin(self, counts: Mapping[Role, int]) -> None:
        self.counts = dict(counts)

    @rule(role=st.sampled_from(ROLES), count=st.integers(1, 4))
    def scale(self, role: Role, count: int) -> None:
        self.counts[role] = count

    @rule(node=st.sampled_from(NODES[1:]))  # a node is always left
    def drain(self, node: str) -> None:
        self.drained.add(node)

    @rule(node=st.sampled_from(NODES))
    def undrain(self, node: str) -> None:
        self.drained.discard(node)

    @rule(seconds=st.floats(0.1, 30.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def advance_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.members)))
        found = self.members[name]
        ended = data.draw(st.sampled_from([None, "it died"]))
        if found.phase == "starting":
            node = data.draw(st.sampled_from([node for node in NODES if node not in self.drained]))
            seen = Report(ready=True, ended=ended, node=found.node or node, url=f"http://{name}")
        else:
            seen = Report(ready=found.phase == "ready", ended=ended)
        self.members[name] = observe(found, seen, self.now)

    @rule(confirmed=st.booleans())
    def reconcile(self, confirmed: bool) -> None:
        if confirmed:
            self.confirm_routes()
        before = dict(self.members)
        failed = {name: found for name, found in before.items() if found.phase == "failed"}
        actions = reconcile(
            Wanted(dict(self.counts), frozenset(self.drained)), list(before.values()), self.routed, POLICY, self.now
        )
        touched = [action.name for action in actions if not isinstance(action, Start)]
        assert len(touched) == len(set(touched)), "one action for each process"
        for action in actions:
            match action:
                case Start(role, failures):
                    self.num_started += 1
                    name = f"{role}-{self.num_started}"
                    self.members[name] = Member(name, role, "starting", self.now, failures)
                case Leave(name):
                    assert before[name].phase == "ready"
                    self.members[name] = member(name, "leaving", self.now, role=before[name].role)
                case Stop(name):
                    assert before[name].phase in ("starting", "leaving")
                    is_late = self.now - before[name].since >= UNROUTE_SECONDS
                    assert before[name].url not in self.routed or is_late, "a router may still use it"
                    self.members[name] = member(name, "stopping", self.now, role=before[name].role)
                case Forget(name):
                    assert before[name].phase in ("gone", "failed")
                    del self.members[name]
        for role in ROLES:
            # A replacement inherits the failures of a process whose delay has passed.
            due = [
                found.failures + 1
                for name, found in failed.items()
                if found.role == role
                and name not in self.members
                and self.now - found.since >= backoff_seconds(found.failures, POLICY)
            ]
            starts = [action.failures for action in actions if isinstance(action, Start) and action.role == role]
            assert Counter(failures for failures in starts if failures) <= Counter(due)
            leaves = sum(isinstance(action, Leave) and before[action.name].role == role for action in actions)
            ready = sum(found.phase == "ready" and found.role == role for found in before.values())
            assert not leaves or ready - leaves >= self.counts[role], "capacity is never below what is wanted"
            kept = [
                found
                for found in self.members.values()
                if found.role == role
                and (
                    found.phase == "failed" or (found.phase in ("starting", "ready") and found.node not in self.drained)
                )
            ]
            assert len(kept) == self.counts[role]

    def confirm_routes(self) -> None:
        self.routed = {found.url or "" for found in self.members.values() if found.phase == "ready"}

    def teardown(self) -> None:
        """If nothing fails any more, the cluster reaches the wanted state within a few passes."""
        for _ in range(12):
            self.now += 61
            for name, found in list(self.members.items()):
                ended = "stopped" if found.phase == "stopping" else None
                seen = Report(
                    found.node or "n1", url=f"http://{name}", ready=found.phase in ("starting", "ready"), ended=ended
                )
                self.members[name] = observe(found, seen, self.now)
            self.drained.discard("n1")
            self.reconcile(confirmed=True)
        for role in ROLES:
            of_role = [found for found in self.members.values() if found.role == role]
            assert [found.phase for found in of_role] == ["ready"] * self.counts[role]
            assert not {found.node for found in of_role} & self.drained


TestSimulatedCluster = pytest.mark.timeout(120)(SimulatedCluster.TestCase)
TestSimulatedCluster.settings = examples(40, stateful_step_count=40)
