"""The table of the checks, and the loop that runs them one after the other."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from hotset.base.devices import GPU_DRIVER, has_gpu_driver
from hotset.base.host_checks import Finding
from hotset.base.status_line import ShowProgress, TaskProgress
from hotset.lab.doctor import disk, exchanges, gpus, machine, rdma
from hotset.lab.doctor.child import CallFailed, ChildProcess
from hotset.lab.doctor.findings import CHECK_SECONDS, Check, CheckResult, Subject

DRIVER_MEND = "look for Xid errors of the driver (dmesg), reset the GPU or restart the machine"
RANKS_SECONDS = 2 * exchanges.RANKS_SECONDS + 30  # the check of NCCL may run ranks twice

MACHINE = (
    Check("versions", machine.check_versions),
    Check("packages", machine.check_packages),
    Check("host", machine.check_host),
    Check("ports", machine.check_ports),
    Check("disk", disk.check_disk, "the file system of the model does not answer; see its server or mount"),
    Check("RDMA", rdma.check_rdma, "the driver of the RDMA devices does not answer; see dmesg"),
)
GPUS = (
    Check("GPUs", gpus.check_gpus, DRIVER_MEND),
    Check("kernels", gpus.check_kernels, DRIVER_MEND),
    Check("copies", gpus.check_copies, DRIVER_MEND),
    Check("pinning", gpus.check_pinning, DRIVER_MEND),
    Check("peer access", gpus.check_peer_access, DRIVER_MEND),
    Check("NCCL", exchanges.check_nccl, exchanges.NCCL_MEND, RANKS_SECONDS, alone=True),
    Check("symmetric memory", exchanges.check_symmetric_memory, "use --collectives nccl", RANKS_SECONDS, alone=True),
)
CPUS = (Check("gloo", exchanges.check_gloo, seconds=RANKS_SECONDS, alone=True),)


def examine(subject: Subject, show: ShowProgress) -> list[CheckResult]:
    """Finds the GPUs, and makes all checks. Raises ConfigError if the settings name GPUs that do not exist."""
    show(TaskProgress("Looking for GPUs"))
    try:
        subject = with_gpus(subject)
    except CallFailed as error:
        broken = CheckResult("GPUs", 0.0, (Finding("broken", f"CUDA does not start: {error}", DRIVER_MEND),))
        return [*run_checks(MACHINE, subject, show), broken, *run_checks(CPUS, subject, show)]
    return run_checks(all_checks(subject), subject, show)


def with_gpus(subject: Subject) -> Subject:
    """Returns the subject with the GPUs that its engine would use, or else all GPUs: one rank for each."""
    config = subject.config
    if config.device == "cpu" or not has_gpu_driver():
        return subject
    with ChildProcess() as child:
        found = child.call(gpus.find_gpus, config, seconds=CHECK_SECONDS)
    divided = config.workers > 1 and config.executor == "processes"
    return replace(subject, gpus=found, ranks=config.workers if divided else max(1, len(found)))


def all_checks(subject: Subject) -> Sequence[Check]:
    """Returns the checks for a subject. Without a usable GPU, those of GPUs are replaced by one that says why."""
    if subject.gpus:
        return MACHINE + GPUS
    if subject.config.device != "cpu" and has_gpu_driver():
        return MACHINE + GPUS[:1] + CPUS
    return (*MACHINE, Check("GPUs", why_no_gpu), *CPUS)


def why_no_gpu(subject: Subject) -> list[Finding]:
    if subject.config.device == "cpu":
        return [Finding("skipped", "--device cpu uses none")]
    return [Finding("skipped", f"no GPU was found: there is no GPU driver ({GPU_DRIVER}); models run on the CPU")]


def run_checks(checks: Sequence[Check], subject: Subject, show: ShowProgress) -> list[CheckResult]:
    """Runs the checks in another process, which is replaced if a check does not finish, and returns what they find."""
    results, child = [], None
    with ExitStack() as processes:
        for number, check in enumerate(checks):
            show(TaskProgress(f"Checking: {check.name}", number, len(checks)))
            if child is None or check.alone or not child.alive:
                processes.close()
                child = processes.enter_context(ChildProcess())
            began = time.monotonic()
            try:
                findings = tuple(child.call(check.function, subject, seconds=check.seconds))
            except CallFailed as error:
                findings = (Finding("broken", str(error), check.mend),)
            results.append(CheckResult(check.name, time.monotonic() - began, findings))
    return results
