"""Communication between workers during a step: pipeline stages, and collectives over torch.distributed."""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hotset.base.engine_settings import CollectivesChoice
from hotset.base.errors import ConfigError
from hotset.engine.workers.agreement import check_same_software, exchange, software_of
from hotset.engine.workers.messages import WorkerRank
from hotset.engine.workers.symmetric import (
    MAX_BYTES_BETWEEN_GPUS,
    AbortFlag,
    SymmetricCollectives,
    allocate_inboxes,
    allocate_staging,
)
from hotset.kernels.collectives import cuda_impl, reference
from hotset.kernels.collectives.cuda_impl import MAX_RANKS, Staging
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.decoder import Decoder
from hotset.models.mtp import MtpOutput

LOGGER = logging.getLogger("hotset.engine")

# A rank waits at most this long for another rank within a step. A step may take any time while its layers advance, and
# the controller ends workers that are dead, stopped or do not advance much earlier.
COLLECTIVE_TIMEOUT = timedelta(days=1)
# NCCL connects ranks, and takes buffers for it, at the first message of each kind, and it has several ways to exchange
# messages of one kind, by their size. These are exchanged before memory is measured.
FIRST_MESSAGES_NCCL = (1 << 10, 1 << 19, 1 << 24)
FIRST_MESSAGES_GLOO = (1 << 10,)


class World(Protocol):
    """The interface through which one worker communicates with the others."""

    collectives: Collectives  # between the tensor parallel ranks of its stage, or between all data parallel ranks
    abort: AbortFlag  # ends the waits of this worker's kernels for other workers

    def send(self, x: Tensor, to: int) -> None:
        """Sends `x` to worker number `to`, which calls `receive`."""

    def receive(self, x: Tensor, source: int) -> None:
        """Fills `x` with the next tensor that worker number `source` sends."""


class Stage:
    """Implements `RunnerModel` for one stage of a pipeline.

    `previous_worker` and `next_worker` are the numbers of the workers with the adjacent stages. The first stage has no
    previous worker (None), and the last stage has no next worker.
    """

    def __init__(self, decoder: Decoder, world: World, previous_worker: int | None, next_worker: int | None) -> None:
        self._decoder, self._world = decoder, world
        self._previous_worker, self._next_worker = previous_worker, next_worker
        self.device, self.dtype, self.vocab = decoder.device, decoder.dtype, decoder.spec.vocab

    @property
    def kv_shape(self) -> KvShape:
        return self._decoder.kv_shape

    def forward(self, token_ids: Tensor, view: View) -> Tensor | None:
        """Returns hidden states at the last stage, and None at all others."""
        return self._forward(token_ids, view)

    def forward_once(self, token_ids: Tensor, view: View) -> Tensor | None:
        return self._forward(token_ids, view, once=True)

    def _forward(self, token_ids: Tensor, view: View, *, once: bool = False) -> Tensor | None:
        if self._previous_worker is None:
            x = self._decoder.embed(token_ids)
        else:
            x = torch.empty(len(token_ids), self._decoder.hidden, dtype=self.dtype, device=self.device)
            self._world.receive(x, self._previous_worker)
        x = self._decoder.run_layers(x, view, once=once)
        if self._next_worker is None:
            return x
        self._world.send(x, self._next_worker)
        return None

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return self._decoder.logits(hidden, indices)

    def mtp_input(self, x: Tensor) -> Tensor:
        return self._decoder.mtp_input(x)

    def run_mtp(self, token_ids: Tensor, hidden: Tensor, view: View, selected: Tensor | None = None) -> MtpOutput:
        return self._decoder.run_mtp(token_ids, hidden, view, selected)

    def mtp_logits(self, normed: Tensor) -> Tensor:
        return self._decoder.mtp_logits(normed)

    def idle_moe_step(self) -> None:
        """Takes part in the expert collectives of a step in which only other replicas compute tokens."""
        self._decoder.idle_moe_step()


RENDEZVOUS_SCHEME = "tcp://"


def make_world(
    rank: WorkerRank,
    device: torch.device,
    collectives: CollectivesChoice = "auto",
    listener: socket.socket | None = None,
) -> World:
    """Connects this worker to the others, and logs how. Blocks until all workers have called this function.

    If the rendezvous is an address, worker 0 passes `listener`, the socket that listens there.

    | workers | collectives | between stages |
    |---|---|---|
    | on CPUs | gloo | gloo |
    | several on a GPU | symmetric memory | symmetric memory |
    | on different GPUs with peer access | symmetric memory up to `MAX_BYTES_BETWEEN_GPUS`, NCCL above | NCCL |
    | on different GPUs without it, or on several nodes | NCCL | NCCL |
    | on GPUs, with `collectives` "nccl" | NCCL | NCCL |
    """
    if rank.ranks_on_gpu > 1 and collectives == "auto":
        return SymmetricWorld(rank, device)
    return DistributedWorld(rank, device, collectives, listener)


class DistributedWorld:
    """Implements `World` over torch.distributed: gloo between CPU processes, NCCL between GPUs."""

    def __init__(
        self,
        rank: WorkerRank,
        device: torch.device,
        collectives: CollectivesChoice = "auto",
        listener: socket.socket | None = None,
    ) -> None:
        on_gpu, size = device.type == "cuda", rank.split.size
        group, store = _join_group(rank, "nccl" if on_gpu else "gloo", device, listener)
        self.abort = AbortFlag(device)
        self.collectives: Collectives = SINGLE_RANK
        choice = "NCCL" if on_gpu else "gloo"
        staging: Staging | None = None
        first_messages = FIRST_MESSAGES_NCCL if on_gpu else FIRST_MESSAGES_GLOO
        if size > 1:
            ranks = DistributedCollectives(group, rank.split.rank, size, device)
            ranks.connect(first_messages, data_parallel=rank.split.dp_size > 1)
            self.collectives = ranks
            obstacle = "of --collectives nccl" if collectives == "nccl" else None
            if on_gpu and obstacle is None:
                obstacle = _obstacle_to_symmetric_memory(group, device, rank.node)
            if on_gpu and obstacle is None:
                allocate = partial(allocate_staging, group, device, self.abort, rank.ranks_on_gpu)
                staging, obstacle = allocate_together(allocate, store, rank)
            if staging is not None:
                self.collectives = SymmetricCollectives(staging, self.abort, large=self.collectives)
                choice = f"symmetric memory up to {MAX_BYTES_BETWEEN_GPUS >> 10} KiB, NCCL for larger messages"
            elif on_gpu:
                choice = f"NCCL, because {obstacle}"
        self._connect_stages(rank, first_messages, device)
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        _log_choice(rank, choice)

    def send(self, x: Tensor, to: int) -> None:
        dist.send(x.contiguous(), to)

    def receive(self, x: Tensor, source: int) -> None:
        dist.recv(x, source)

    def _connect_stages(self, rank: WorkerRank, message_bytes: Sequence[int], device: torch.device) -> None:
        """Sends messages of these sizes from each stage to the next."""
        for nbytes in message_bytes if rank.stages > 1 else ():
            x = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            if rank.stage > 0:
                self.receive(x, rank.number - rank.split.size)
            if rank.stage < rank.stages - 1:
                self.send(x, rank.number + rank.split.size)


class SymmetricWorld:
    """Implements `World` for workers that share GPUs: symmetric memory for all messages, and gloo to set it up.

    Without the multi-process service (MPS), the processes take turns on the GPU, and each message takes some 20 ms.
    """

    def __init__(self, rank: WorkerRank, device: torch.device) -> None:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        (group, _), all_workers = _join_group(rank, "gloo", device), dist.group.WORLD
        assert all_workers is not None, "init_process_group makes it"
        if (obstacle := _obstacle_to_symmetric_memory(all_workers, device, rank.node)) is not None:
            raise ConfigError(f"ranks cannot share GPUs, because {obstacle}: use one GPU for each rank")
        self.abort = AbortFlag(device)
        self.collectives: Collectives = SINGLE_RANK
        if rank.split.size > 1:
            staging = allocate_staging(group, device, self.abort, rank.ranks_on_gpu)
            self.collectives = SymmetricCollectives(staging, self.abort)
        if rank.stages > 1:
            self._inboxes = allocate_inboxes(all_workers, device, self.abort, rank.ranks_on_gpu)
        _log_choice(rank, f"symmetric memory for all messages, because {rank.ranks_on_gpu} ranks share a GPU")

    def send(self, x: Tensor, to: int) -> None:
        cuda_impl.send(self._inboxes, x.contiguous(), to)

    def receive(self, x: Tensor, source: int) -> None:
        cuda_impl.receive(self._inboxes, x, source)


class _Joined(NamedTuple):
    group: dist.ProcessGroup  # of the workers of one stage
    store: Any  # through which all workers can exchange texts


def _join_group(rank: WorkerRank, backend: str, device: torch.device, listener: socket.socket | None = None) -> _Joined:
    """Joins the process group through the rendezvous.

    Raises ConfigError if workers run different software, or if NCCL cannot connect the GPUs.
    """
    os.environ.update(_network_settings(rank))
    store = _open_store(rank, listener)
    check_same_software(store, rank, software_of(device, rank.workers))
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank.number,
            world_size=rank.workers,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if backend == "nccl" else None,  # NCCL connects now, not in the first step
        )
    except dist.DistBackendError as error:
        *_, reason = str(error).strip().splitlines()
        raise ConfigError(
            f"NCCL cannot connect the GPUs: {reason}; `hotset doctor` tests them, NCCL_DEBUG=WARN shows more, and "
            "NCCL_NVLS_ENABLE=0 helps where multicast (NVLS) fails"
        ) from error
    size = rank.split.size
    # torch.distributed requires every process to create the groups of all stages, in the same order.
    groups: list[dist.ProcessGroup] = [
        dist.new_group(range(first, first + size), timeout=COLLECTIVE_TIMEOUT) for first in range(0, rank.workers, size)
    ]
    return _Joined(groups[rank.stage], store)


def allocate_together(
    allocate: Callable[[], Staging], store: Any, rank: WorkerRank
) -> tuple[Staging | None, str | None]:
    """Returns the staging buffers of this rank if all ranks of its group have theirs. Otherwise returns None, and what
    failed: then none of them may use symmetric memory. Blocks until all of them have called this."""
    try:
        staging, failure = allocate(), ""
    except RuntimeError as error:  # of the driver, or of torch
        staging, failure = None, str(error).strip().partition("\n")[0] or repr(error)
    size = rank.split.size
    members = range(rank.stage * size, (rank.stage + 1) * size)
    failures = exchange(store, f"symmetric memory of stage {rank.stage}", rank.number, members, failure)
    for member, text in zip(members, failures, strict=True):
        if text:
            return None, f"symmetric memory fails on worker {member}: {text}"
    return staging, None


def _network_settings(rank: WorkerRank) -> dict[str, str]:
    """Returns the environment variables that gloo, NCCL and torch's symmetric memory read when they start."""
    settings = {
        "GLOO_SOCKET_IFNAME": rank.interface,
        "NCCL_SOCKET_IFNAME": f"={rank.interface}",  # without "=", NCCL takes it for the beginning of a name
        "NCCL_RAS_ENABLE": "0",  # else NCCL listens on a fixed port
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # unused here, and its set-up fails or hangs on some machines
    }
    if rank.ranks_on_gpu > 1:
        # NCCL refuses two ranks on one GPU of one host. These settings make each rank look like a host of its own.
        settings |= {"NCCL_HOSTID": f"rank{rank.number}", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
        settings |= {"NCCL_MAX_CTAS": "2"}  # kernels that wait for each other must all have a place on the GPU
    return settings


def _open_store(rank: WorkerRank, listener: socket.socket | None) -> Any:
    """Opens the store through which workers exchange their addresses: a file, which needs no port, if all workers are
    on this machine, else a socket of worker 0."""
    if not rank.rendezvous.startswith(RENDEZVOUS_SCHEME):
        return dist.FileStore(rank.rendezvous, rank.workers)  # type: ignore[attr-defined]
    host, _, port = rank.rendezvous.removeprefix(RENDEZVOUS_SCHEME).rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]
        host.strip("[]"),
        int(port),
        rank.workers,
        is_master=rank.number == 0,
        timeout=COLLECTIVE_TIMEOUT,
        master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
    )


def _obstacle_to_symmetric_memory(group: dist.ProcessGroup, device: torch.device, node: str) -> str | None:
    """Returns why the ranks of a group cannot use symmetric memory, or None if they can. All ranks get the same answer.

    `node` is the node of this rank.
    """
    if group.size() > MAX_RANKS:
        return f"symmetric memory supports {MAX_RANKS} ranks, not {group.size()}"
    gpus: list[tuple[str, int]] = [("", 0)] * group.size()
    dist.all_gather_object(gpus, (node, device.index), group=group)
    if len({node for node, _ in gpus}) > 1:
        return "the ranks are on several nodes"
    for first, second in permutations(sorted({index for _, index in gpus}), 2):
        if not torch.cuda.can_device_access_peer(first, second):
            return f"GPU {first} has no peer access to GPU {second}"
    return None


def _log_choice(rank: WorkerRank, choice: str) -> None:
    if rank.number == 0 and rank.workers > 1:
        LOGGER.info("%d workers communicate over %s", rank.workers, choice)


class DistributedCollectives:
    """Implements `Collectives` for the members of one process group."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.tokens_per_rank: Sequence[int] = ()
        self._group = group
        self._on_gpu = device.type == "cuda"

    def connect(self, message_bytes: Sequence[int], *, data_parallel: bool) -> None:
        """Exchanges messages of these sizes through all operations that steps use. All ranks must call it."""
        device = torch.device("cuda", torch.cuda.current_device()) if self._on_gpu else torch.device("cpu")
        for nbytes in message_bytes:
            x = torch.zeros(1, nbytes // 2, dtype=torch.bfloat16, device=device)
            if data_parallel:
                self.tokens_per_rank = [1] * self.size
                self.all_gather_tokens(x)
                self.reduce_scatter(x.expand(self.size, -1))
            else:
                self.all_reduce(x)
                self.all_gather_columns(x)
                self.broadcast(x)
        self.tokens_per_rank = ()
        self.barrier()

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._on_gpu:
            dist.all_reduce(x, group=self._group)
            return x
        return reference.all_reduce(self._all_gather(x))

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return reference.all_gather_columns(self._all_gather(x))

    def all_gather_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Gathers the bytes of all tensors in one message, because each message adds latency."""
        own, largest = self.tokens_per_rank[self.rank], max(self.tokens_per_rank)
        widths = [tensor.element_size() * tensor.shape[1:].numel() for tensor in tensors]  # bytes of a token
        packed = tensors[0].new_zeros(largest, sum(widths), dtype=torch.uint8)
        for part, tensor, width in zip(packed[:own].split(widths, dim=1), tensors, widths, strict=True):
            part.copy_(tensor.contiguous().view(torch.uint8).view(own, width))
        parts = self._all_gather(packed)
        gathered = torch.cat([part[:count] for part, count in zip(parts, self.tokens_per_rank, strict=True)])
        return [
            part.clone(memory_format=torch.contiguous_format).view(tensor.dtype).view(-1, *tensor.shape[1:])
            for tensor, part in zip(tensors, gathered.split(widths, dim=1), strict=True)
        ]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sends each rank only its own tokens. Adds in the order of the ranks, also on GPUs."""
        own = self.tokens_per_rank[self.rank]
        parts = x.new_empty(self.size * own, *x.shape[1:])
        dist.all_to_all_single(parts, x.contiguous(), [own] * self.size, list(self.tokens_per_rank), group=self._group)
        return reference.all_reduce(parts.view(self.size, own, *x.shape[1:]))

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.broadcast(x, group=self._group, group_src=0)
        return x

    def barrier(self) -> None:
        """Waits until every rank has finished the work that it submitted before its own call of `barrier`."""
        if self._on_gpu:
            torch.cuda.synchronize()
        dist.barrier(self._group)

    def _all_gather(self, x: Tensor) -> Tensor:
        """Returns the tensors of all ranks in their order, as the first dimension."""
        gathered = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(gathered.view(-1), x.contiguous().view(-1), group=self._group)
        return gathered
