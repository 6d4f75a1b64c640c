"""The controller: the Ray actor that starts and ends processes until an application has its wanted state.

It runs a loop: ask the supervisors for reports, decide (`reconcile.py`, `scaling.py`), act. Its state is in the storage
of the Ray head, so that a restarted controller continues where the previous one stopped.
"""

import logging
import os
import pickle
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util.metrics import Counter, Gauge

from hotset.fleet.cluster.reconcile import (
    Action,
    Forget,
    Leave,
    Member,
    Report,
    Start,
    Stop,
    Wanted,
    observe,
    reconcile,
)
from hotset.fleet.cluster.scaling import Load, Scaler
from hotset.fleet.cluster.spec import ENGINE_ROLES, ClusterSpec, EngineRole, Role
from hotset.fleet.cluster.supervisor import Launch, Supervisor

logger = logging.getLogger("hotset.fleet.cluster")

CONTROLLER = "controller"  # the name of the actor
LOOP_SECONDS = 0.5
MAX_CALLS = 16  # commands that are answered at the same time
SUSPECT_SECONDS = 60.0  # a node whose supervisors do not answer is avoided this long; then Ray knows if it is lost


def namespace_of(application: str) -> str:
    """Returns the Ray namespace of an application."""
    return f"hotset-{application}"


def state_key(application: str) -> bytes:
    return f"hotset-{application}/state".encode()


@dataclass
class _State:
    """The stored state, which a restarted controller reads."""

    wanted: Wanted
    members: dict[str, Member] = field(default_factory=dict)
    num_started: int = 0
    num_restarts: int = 0


@dataclass
class _Link:
    """The supervisor of a member, and the report that was requested from it."""

    actor: Any
    asked_at: float
    pending: Any = None
    newest: Report | None = None
    workers: Mapping[str, list[str]] | None = None  # the workers that were last sent to it, if it is a router's


class Controller:
    """The actor. The command line calls its methods, which run in other threads than the loop."""

    def __init__(self, spec: ClusterSpec, secrets: Mapping[str, str], versions: Mapping[str, str | None]) -> None:
        self._spec = spec
        self._versions = versions
        self._secrets = secrets
        self._namespace = namespace_of(spec.name)
        self._epoch = uuid.uuid4().hex
        self._lock = threading.Lock()
        stored = internal_kv._internal_kv_get(state_key(spec.name))
        self._stored = stored
        self._state: _State = _State(Wanted(spec.counts())) if stored is None else pickle.loads(stored)
        self._links: dict[str, _Link] = {}
        self._suspects: dict[str, float] = {}  # nodes whose supervisors do not answer, and since when
        self._error = ""  # of the newest pass of the loop
        targets = {role: spec.target_of(role) for role in ENGINE_ROLES}
        self._scalers = {role: Scaler(target) for role, target in targets.items() if target is not None}
        self._metrics = _RayMetrics()
        for member in self._state.members.values():
            self._connect(member)
        threading.Thread(target=self._run, name="hotset-controller", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """Returns the wanted state and all members, as plain values."""
        with self._lock:
            members = [self._member_status(member) for member in self._state.members.values()]
            wanted = self._state.wanted
            return {
                "name": self._spec.name,
                "model": self._spec.model,
                "counts": dict(wanted.counts),
                "drained": sorted(wanted.drained),
                "shutdown": wanted.shutdown,
                "restarts": self._state.num_restarts,
                "controller_pid": os.getpid(),
                "controller_epoch": self._epoch,
                "controller_error": self._error,
                "members": members,
            }

    def spec(self) -> ClusterSpec:
        return self._spec

    def knows(self, name: str) -> bool:
        """Returns whether a process still belongs to the application. Otherwise it should end."""
        with self._lock:
            member = self._state.members.get(name)
            return member is not None and member.phase not in ("failed", "gone")

    def scale(self, counts: Mapping[Role, int]) -> None:
        """Changes the wanted numbers of processes."""
        with self._lock:
            wanted = self._state.wanted
            self._state.wanted = replace(wanted, counts={**wanted.counts, **counts})
            self._store()

    def drain(self, node: str, *, now: bool) -> None:
        """Removes all processes from a node, and starts none there. If `now`, does not wait for replacements."""
        with self._lock:
            wanted = self._state.wanted
            hurried = wanted.hurried | {node} if now else wanted.hurried
            self._state.wanted = replace(wanted, drained=wanted.drained | {node}, hurried=hurried)
            self._store()

    def undrain(self, node: str) -> None:
        """Uses a drained node again."""
        with self._lock:
            wanted = self._state.wanted
            self._state.wanted = replace(wanted, drained=wanted.drained - {node}, hurried=wanted.hurried - {node})
            self._store()

    def shut_down(self, *, now: bool) -> None:
        """Removes all processes: routers first, then decode engines, then prefill engines."""
        with self._lock:
            self._state.wanted = replace(self._state.wanted, shutdown="now" if now else "drain")
            self._store()
            if now:
                for name, link in self._links.items():
                    if self._state.members[name].phase in ("leaving", "stopping"):
                        link.actor.stop.remote(now=True)

    def _member_status(self, member: Member) -> dict[str, Any]:
        link = self._links.get(member.name)
        report = None if link is None else link.newest
        return {
            **asdict(member),
            "seconds": max(0.0, time.time() - member.since),
            "pid": None if report is None else report.pid,
            "up": [] if report is None else list(report.up),
            "load": asdict(Load() if report is None else report.load),
        }

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                reports = self._collect_reports()
                with self._lock:
                    self._pass(reports)
                self._error = ""
            except Exception as error:  # the next pass tries again; status shows the error
                self._error = f"{type(error).__name__}: {error}"
                logger.exception("a pass of the controller failed")
            time.sleep(max(0.0, LOOP_SECONDS - (time.monotonic() - began)))

    def _collect_reports(self) -> dict[str, Report]:
        """Requests a report from every supervisor without an open request. Returns the reports that have arrived, and
        reports of supervisors that were lost.

        A supervisor is lost if it has answered before (perhaps to an earlier controller) and now does not answer for
        `silent_seconds`. A supervisor that has never answered may still wait for its resources.
        """
        found: dict[str, Report] = {}
        links = dict(self._links)
        for link in links.values():
            if link.pending is None:
                link.pending, link.asked_at = link.actor.report.remote(self._epoch), time.monotonic()
        refs = [link.pending for link in links.values()]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=LOOP_SECONDS)[0]) if refs else set()
        for name, link in links.items():
            if link.pending in ready:
                try:
                    found[name] = link.newest = ray.get(link.pending)
                    self._suspects.pop(link.newest.node, None)
                except ray.exceptions.RayError as error:
                    found[name] = _lost(str(error))
                link.pending = None
            elif (node := self._node_of(name)) and time.monotonic() - link.asked_at > self._spec.restart.silent_seconds:
                self._suspects[node] = time.monotonic()
                found[name] = _lost(f"its supervisor has not answered for {time.monotonic() - link.asked_at:.0f} s")
        return found

    def _node_of(self, name: str) -> str | None:
        """Returns the node of a process, or None if its supervisor has never answered."""
        member = self._state.members.get(name)
        return None if member is None else member.node

    def _pass(self, reports: Mapping[str, Report]) -> None:
        """Updates the members, decides, and acts."""
        now = time.time()
        members = self._state.members
        for name, report in reports.items():
            if name in members:
                before = members[name]
                members[name] = observe(before, report, now)
                if members[name].phase != before.phase:
                    logger.info("%s: %s -> %s %s", name, before.phase, members[name].phase, members[name].error)
        self._follow_targets(now)
        routed = {url for name, link in self._links.items() if self._is_ready_router(name) for url in _routed(link)}
        for action in reconcile(self._state.wanted, list(members.values()), routed, self._spec.restart, now):
            self._perform(action, now)
        self._store()
        self._send_workers()
        self._metrics.set(list(members.values()), self._loads_by_name())

    def _follow_targets(self, now: float) -> None:
        wanted = self._state.wanted
        for role, scaler in self._scalers.items():
            count = scaler.count(wanted.counts[role], self._loads(role), now)
            if count != wanted.counts[role] and wanted.shutdown == "no":
                logger.info("%s engines: %d -> %d", role, wanted.counts[role], count)
                wanted = self._state.wanted = replace(wanted, counts={**wanted.counts, role: count})

    def _loads(self, role: EngineRole) -> list[Load]:
        loads, members = self._loads_by_name(), self._state.members
        return [load for name, load in loads.items() if members[name].role == role and members[name].phase == "ready"]

    def _loads_by_name(self) -> dict[str, Load]:
        return {name: link.newest.load for name, link in self._links.items() if link.newest is not None}

    def _is_ready_router(self, name: str) -> bool:
        member = self._state.members[name]
        return member.role == "router" and member.phase == "ready"

    def _perform(self, action: Action, now: float) -> None:
        members = self._state.members
        match action:
            case Start(role, failures):
                self._state.num_started += 1
                self._state.num_restarts += failures > 0
                member = Member(f"{role}-{self._state.num_started}", role, "starting", now, failures)
                members[member.name] = member
                self._store()  # before the supervisor exists, so that a restarted controller knows it
                self._start(member)
            case Leave(name):
                members[name] = replace(members[name], phase="leaving", since=now)
            case Stop(name):
                members[name] = replace(members[name], phase="stopping", since=now)
                link = self._links[name]
                if link.newest is None:  # the supervisor still waits for its resources
                    members[name] = replace(members[name], phase="gone")
                else:
                    link.actor.stop.remote(now=self._state.wanted.shutdown == "now")
            case Forget(name):
                forgotten = self._links.pop(name, None)
                if forgotten is not None:  # otherwise the supervisor is lost
                    ray.kill(forgotten.actor, no_restart=True)
                del members[name]

    def _start(self, member: Member) -> None:
        demand = self._spec.demand(member.role)
        launch = Launch(
            application=self._spec.name,
            name=member.name,
            role=member.role,
            spec=self._spec,
            secrets=self._secrets,
            workers=self._workers(),
            controller=CONTROLLER,
            versions=self._versions,
        )
        avoided = set(self._state.wanted.drained)
        if member.role == "router" and self._spec.routers.port:
            others = [other for other in self._state.members.values() if other.role == "router"]
            avoided |= {other.node for other in others if other.node is not None and other.phase != "failed"}
        deadline = time.monotonic() - SUSPECT_SECONDS
        suspects = {node for node, since in self._suspects.items() if since > deadline}
        actor = (
            ray.remote(Supervisor)
            .options(
                name=member.name,
                namespace=self._namespace,
                lifetime="detached",
                max_restarts=0,
                num_cpus=demand.pop("CPU", 0),
                num_gpus=demand.pop("GPU", 0),
                memory=demand.pop("memory", None),
                resources=demand,
                label_selector=_outside(avoided | suspects),
                fallback_strategy=[{"label_selector": _outside(avoided)}] if suspects else None,
            )
            .remote(launch)
        )
        actor.start.remote()
        self._links[member.name] = _Link(actor, time.monotonic())

    def _connect(self, member: Member) -> None:
        """Finds the supervisor of a member that an earlier controller started."""
        try:
            actor = ray.get_actor(member.name, namespace=self._namespace)
        except ValueError:
            lost = Report(ended="its supervisor was lost")
            self._state.members[member.name] = observe(member, lost, time.time())
            return
        actor.start.remote()  # the earlier controller may have ended before it called this
        self._links[member.name] = _Link(actor, time.monotonic())

    def _workers(self) -> dict[str, list[str]]:
        """Returns the URLs of the engines to which routers may send requests."""
        ready = [member for member in self._state.members.values() if member.phase == "ready" and member.url]
        return {role: [member.url or "" for member in ready if member.role == role] for role in ENGINE_ROLES}

    def _send_workers(self) -> None:
        workers = self._workers()
        for name, link in self._links.items():
            if self._state.members[name].role == "router" and link.newest is not None and link.workers != workers:
                link.actor.set_workers.remote(workers)
                link.workers = workers

    def _store(self) -> None:
        stored = pickle.dumps(self._state)
        if stored != self._stored:
            internal_kv._internal_kv_put(state_key(self._spec.name), stored)
            self._stored = stored


class _RayMetrics:
    """The load of all engines as metrics of Ray, which its nodes export to Prometheus."""

    def __init__(self) -> None:
        tags = ("engine", "role")
        self._loads = {
            "running": Gauge("hotset_cluster_requests_running", "Requests that run.", tags),
            "waiting_requests": Gauge("hotset_cluster_requests_waiting", "Requests that wait.", tags),
            "waiting_tokens": Gauge("hotset_cluster_tokens_waiting", "Tokens that wait to be computed.", tags),
            "kv_usage": Gauge("hotset_cluster_kv_usage", "Share of the KV memory that requests use.", tags),
            "tier_pressure": Gauge("hotset_cluster_tier_pressure", "Share of requests tiered or parked.", tags),
        }
        self._phases = Gauge("hotset_cluster_processes", "Processes by role and phase.", ("role", "phase"))
        self._failed = Counter("hotset_cluster_failures", "Processes that have failed.", ("role",))
        self._known_failures: set[str] = set()
        self._shown_engines: set[tuple[str, str]] = set()
        self._shown_phases: set[tuple[str, str]] = set()

    def set(self, members: list[Member], loads: Mapping[str, Load]) -> None:
        """Sets the metrics. Metrics of engines and phases that no longer exist become 0."""
        for member in members:
            if member.phase == "failed" and member.name not in self._known_failures:
                self._known_failures.add(member.name)
                self._failed.inc(tags={"role": member.role})
        self._shown_engines |= {(member.name, member.role) for member in members if member.role != "router"}
        for name, role in self._shown_engines:
            for measure, gauge in self._loads.items():
                gauge.set(getattr(loads.get(name, Load()), measure), tags={"engine": name, "role": role})
        phases: list[tuple[str, str]] = [(member.role, member.phase) for member in members]
        self._shown_phases |= set(phases)
        for role, phase in self._shown_phases:
            self._phases.set(phases.count((role, phase)), tags={"role": role, "phase": phase})


def _outside(nodes: Collection[str]) -> dict[str, str]:
    """Returns a label selector for all nodes except these."""
    return {"ray.io/node-id": f"!in({','.join(sorted(nodes))})"} if nodes else {}


def _lost(reason: str) -> Report:
    return Report(ended=f"its supervisor was lost: {' '.join(reason.split())[:300]}")


def _routed(link: _Link) -> tuple[str, ...]:
    return () if link.newest is None else link.newest.routed
