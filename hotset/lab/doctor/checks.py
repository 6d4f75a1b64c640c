"""The table of the checks, and the loop that runs them one after the other."""

import time
from collections.abc import Sequence
from contextlib import ExitStack

from hotset.base.devices import GPU_DRIVER, has_gpu_driver
from hotset.base.host_checks import Finding
from hotset.base.status_line import ShowProgress, TaskProgress
from hotset.lab.doctor import disk, exchanges, gpus, machine, rdma
from hotset.lab.doctor.child import CallFailed, ChildProcess
from hotset.lab.doctor.findings import Check, CheckResult, Subject

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
