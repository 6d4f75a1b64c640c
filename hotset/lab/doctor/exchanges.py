"""Checks of what ranks exchange during a step: over NCCL, over symmetric memory, and over gloo on CPUs."""

from dataclasses import replace

from hotset.base.devices import mps_pipe_directory
from hotset.base.host_checks import Finding, Level
from hotset.lab.doctor.findings import Subject, show_seconds
from hotset.lab.doctor.ranks import Exchange, Ranks, RanksFailed, run_ranks

RANKS_SECONDS = 60.0
MAX_SMALL_SECONDS = 200e-6  # two ranks of one H200 that use sockets take 209 us, eight take 1,089 us (2026-11-19)
CPU_RANKS = 2
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}
NCCL_MEND = "run again with NCCL_DEBUG=INFO, and compare the versions of driver and NCCL; in a container: --shm-size 1g"
MPS_MEND = "start the multi-process service: nvidia-cuda-mps-control -d"


def check_nccl(subject: Subject) -> list[Finding]:
    """Exchanges data over NCCL alone. If that fails, tries whether it works without NCCL's multicast."""
    if (skipped := _nothing_to_exchange(subject)) is not None:
        return [skipped]
    ranks = _ranks(subject, nccl=True)
    try:
        return [judge_exchange(subject, run_ranks(ranks, RANKS_SECONDS))]
    except RanksFailed as error:
        reason = str(error)
    try:
        run_ranks(replace(ranks, environment=NO_MULTICAST), RANKS_SECONDS)
    except RanksFailed:
        return [Finding("broken", reason, f"{NCCL_MEND}; NCCL_NVLS_ENABLE=0 was tried, too, and does not help")]
    return [Finding("broken", reason, "set NCCL_NVLS_ENABLE=0: without its multicast, NCCL works here")]


def check_symmetric_memory(subject: Subject) -> list[Finding]:
    """Exchanges data as the engine does by default, over symmetric memory where GPUs can address each other."""
    if (skipped := _nothing_to_exchange(subject)) is not None:
        return [skipped]
    if subject.config.collectives == "nccl":
        return [Finding("skipped", "--collectives nccl does not use it")]
    try:
        exchange = run_ranks(_ranks(subject, nccl=False), RANKS_SECONDS)
    except RanksFailed as error:
        return [Finding("broken", str(error), "use --collectives nccl, and report this output")]
    if not exchange.symmetric:
        return [Finding("slow", exchange.choice, "see the check of peer access")]
    return [judge_exchange(subject, exchange)]


def check_gloo(subject: Subject) -> list[Finding]:
    """Exchanges data between processes on the CPU."""
    try:
        exchange = run_ranks(Ranks(("cpu",) * max(CPU_RANKS, subject.ranks)), RANKS_SECONDS)
    except RanksFailed as error:
        return [Finding("broken", str(error), "see whether a firewall or the container forbids loopback connections")]
    return [judge_exchange(subject, exchange)]


def judge_exchange(subject: Subject, exchange: Exchange) -> Finding:
    if not exchange.right:
        return Finding("broken", f"{exchange.choice}: an all_reduce computed a wrong sum", "report this output")
    found = f"{exchange.choice}: 256 KiB in {show_seconds(exchange.small)}"
    if exchange.small_in_graph is not None:
        found += f", in a CUDA graph {show_seconds(exchange.small_in_graph)}"
    if exchange.large is not None:
        found += f"; 64 MiB in {show_seconds(exchange.large)}"
    if exchange.symmetric:
        found += f"; torch's multicast is {'on' if exchange.multicast else 'off'}"
    level, mend = _judge_time(subject, exchange)
    return Finding(level, found, mend)


def _judge_time(subject: Subject, exchange: Exchange) -> tuple[Level, str]:
    if exchange.small_in_graph is None:
        return "good", ""
    if subject.ranks_per_gpu > 1:  # NCCL then uses sockets, as between nodes
        return ("good", "") if (mps_pipe_directory() / "control").exists() else ("slow", MPS_MEND)
    if exchange.small_in_graph > MAX_SMALL_SECONDS:
        return "slow", "ranks may exchange data through host memory or sockets: run again with NCCL_DEBUG=INFO"
    return "good", ""


def _nothing_to_exchange(subject: Subject) -> Finding | None:
    return Finding("skipped", "there is only one rank") if subject.ranks == 1 else None


def _ranks(subject: Subject, *, nccl: bool) -> Ranks:
    devices = tuple(f"cuda:{subject.gpus[rank // subject.ranks_per_gpu]}" for rank in range(subject.ranks))
    return Ranks(devices, subject.ranks_per_gpu, "nccl" if nccl else "auto")
