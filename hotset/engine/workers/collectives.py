"""What workers say to each other in a step, over torch.distributed."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hotset.engine.workers.messages import WorkerRank
from hotset.models.collectives import SINGLE_RANK, Collectives

# A rank waits so long for another within a step. The controller notices before that if one died.
LIMIT = timedelta(seconds=300)


class DistributedWorld:
    """Implements `World`: every worker's way to the others."""

    def __init__(self, place: WorkerRank, device: torch.device) -> None:
        """Meets the other workers at the rendezvous."""
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"tcp://{place.rendezvous}",
            rank=place.number,
            world_size=place.workers,
            timeout=LIMIT,
            device_id=device if on_gpu else None,
        )
        each = place.split.size
        # Everybody makes the groups of all stages, in the same order.
        groups = [dist.new_group(range(first, first + each), timeout=LIMIT) for first in range(0, place.workers, each)]
        self.collectives: Collectives = SINGLE_RANK
        if each > 1:
            self.collectives = DistributedCollectives(groups[place.stage], place.split.rank, each, device)

    def send(self, x: Tensor, to: int) -> None:
        dist.send(x.contiguous(), to)

    def receive(self, x: Tensor, source: int) -> None:
        dist.recv(x, source)


class DistributedCollectives:
    """Implements `Collectives` among the members of one group."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self.tokens_per_rank: Sequence[int] = ()
        self._group = group
        self._reduces = device.type == "cuda"

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._reduces:
            dist.all_reduce(x, group=self._group)
            return x
        # Added in the order of the ranks: the same bits on every one of them.
        return torch.stack(self._gathered(x)).sum(0)

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return torch.cat(self._gathered(x), dim=-1)

    def all_gather_tokens(self, x: Tensor) -> Tensor:
        most = max(self.tokens_per_rank)
        padded = x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        parts = self._gathered(padded)
        return torch.cat([part[:count] for part, count in zip(parts, self.tokens_per_rank, strict=True)])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        first = sum(self.tokens_per_rank[: self.rank])
        return self.all_reduce(x)[first : first + self.tokens_per_rank[self.rank]]

    def barrier(self) -> None:
        """Everybody has done what it was told so far."""
        if self._reduces:
            torch.cuda.synchronize()
        dist.barrier(self._group)

    def _gathered(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return parts
