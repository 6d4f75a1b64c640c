"""Communication between workers during a step: pipeline stages, and collectives over torch.distributed."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hotset.base.listeners import LOOPBACK_INTERFACE
from hotset.engine.workers.abort import AbortFlag
from hotset.engine.workers.messages import WorkerRank
from hotset.memory.device_pool import KvShape
from hotset.memory.view import View
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.decoder import Decoder

# A rank waits at most this long for another rank within a step. A step may take any time while its layers advance, and
# the controller ends workers that are dead, stopped or do not advance much earlier.
COLLECTIVE_TIMEOUT = timedelta(days=1)


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
    previous worker (None), the last stage no next one.
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
        if self._previous_worker is None:
            x = self._decoder.embed(token_ids)
        else:
            x = torch.empty(len(token_ids), self._decoder.hidden, dtype=self.dtype, device=self.device)
            self._world.receive(x, self._previous_worker)
        x = self._decoder.run_layers(x, view)
        if self._next_worker is None:
            return x
        self._world.send(x, self._next_worker)
        return None

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        return self._decoder.logits(hidden, indices)

    def idle_moe_step(self) -> None:
        """Takes part in the expert collectives of a step in which only other replicas compute tokens."""
        self._decoder.idle_moe_step()


def make_world(rank: WorkerRank, device: torch.device) -> World:
    """Connects this worker to the others. Blocks until all of them have called it."""
    return DistributedWorld(rank, device)


class DistributedWorld:
    """Implements `World` over torch.distributed: NCCL between GPUs, gloo between CPU processes."""

    def __init__(self, rank: WorkerRank, device: torch.device) -> None:
        """Joins the process group through the rendezvous file. Blocks until all other workers have joined.

        All workers are on this machine. A file needs no port, and the connections between workers use loopback.
        """
        on_gpu = device.type == "cuda"
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK_INTERFACE
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.FileStore(rank.rendezvous, rank.workers),  # type: ignore[attr-defined]
            rank=rank.number,
            world_size=rank.workers,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if on_gpu else None,
        )
        self.abort = AbortFlag(device)
        size = rank.split.size
        # torch.distributed requires every process to create the groups of all stages, in the same order.
        groups = [
            dist.new_group(range(first, first + size), timeout=COLLECTIVE_TIMEOUT)
            for first in range(0, rank.workers, size)
        ]
        self.collectives: Collectives = SINGLE_RANK
        if size > 1:
            self.collectives = DistributedCollectives(groups[rank.stage], rank.split.rank, size, device)

    def send(self, x: Tensor, to: int) -> None:
        dist.send(x.contiguous(), to)

    def receive(self, x: Tensor, source: int) -> None:
        dist.recv(x, source)


class DistributedCollectives:
    """Implements `Collectives` for the members of one process group."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.tokens_per_rank: Sequence[int] = ()
        self._group = group
        self._on_gpu = device.type == "cuda"

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._on_gpu:
            dist.all_reduce(x, group=self._group)
            return x
        # Every rank adds the parts in the order of the ranks, so all get the same bits.
        return torch.stack(self._all_gather(x)).sum(0)

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return torch.cat(self._all_gather(x), dim=-1)

    def all_gather_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        return [self._gather_tokens(tensor) for tensor in tensors]

    def _gather_tokens(self, x: Tensor) -> Tensor:
        most = max(self.tokens_per_rank)
        padded = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        parts = self._all_gather(padded)
        return torch.cat([part[:count] for part, count in zip(parts, self.tokens_per_rank, strict=True)])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        first = sum(self.tokens_per_rank[: self.rank])
        return self.all_reduce(x)[first : first + self.tokens_per_rank[self.rank]]

    def broadcast(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.broadcast(x, group=self._group, group_src=0)
        return x

    def barrier(self) -> None:
        """Waits until every rank has finished the work that it submitted before its own call of `barrier`."""
        if self._on_gpu:
            torch.cuda.synchronize()
        dist.barrier(self._group)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return parts
