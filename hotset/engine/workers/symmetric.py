"""Collectives over torch's symmetric memory, for ranks that can address each other's device memory, and the flag that
ends the waits of this worker's collectives after another worker has failed."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hotset.base.errors import EngineStopped
from hotset.kernels.collectives import cuda_impl
from hotset.kernels.collectives.cuda_impl import ROUND_BYTES, SEND_BYTES, Staging
from hotset.models.collectives import Collectives

# Between GPUs, larger messages use NCCL, which has more links and blocks at its disposal.
MAX_BYTES_BETWEEN_GPUS = 512 << 10


class AbortFlag:
    """A word that kernels read while they wait for other ranks. Once it is set, no kernel of this worker waits.

    It stays set. The results of the steps in flight are then undefined, so the worker must call `check` before it
    reports a step.
    """

    def __init__(self, device: torch.device) -> None:
        # [1] int32: 0, or 1 if set. With a GPU it is pinned, so kernels can read it at the same address.
        self.word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def set(self) -> None:
        """Sets the flag. Any thread may call this at any time, also while the main thread waits for the device."""
        self.word.fill_(1)

    @property
    def is_set(self) -> bool:
        return bool(self.word.item())

    def check(self) -> None:
        """Raises EngineStopped if the flag is set."""
        if self.is_set:
            raise EngineStopped("steps in flight were aborted: another worker failed, or the engine has ended")


class SymmetricCollectives:
    """Implements `Collectives` with our own kernels, which CUDA graphs can capture. Adds in the order of the ranks.

    Messages of more than `max_bytes` go to `large`, if that is given. Kernels wait for other ranks without a timeout;
    `abort` ends their waits.
    """

    def __init__(
        self,
        staging: Staging,
        abort: AbortFlag,
        large: Collectives | None = None,
        max_bytes: int = MAX_BYTES_BETWEEN_GPUS,
    ) -> None:
        self.rank, self.size = staging.rank, staging.size
        self.tokens_per_rank: Sequence[int] = ()
        self._staging, self._abort = staging, abort
        self._large, self._max_bytes = large, max_bytes

    def all_reduce(self, x: Tensor) -> Tensor:
        if (large := self._for_large(x.nbytes)) is not None:
            return large.all_reduce(x)
        x = x.contiguous()
        cuda_impl.all_reduce(self._staging, x)
        return x

    def all_gather_columns(self, x: Tensor) -> Tensor:
        if (large := self._for_large(x.nbytes)) is not None:
            return large.all_gather_columns(x)
        return cuda_impl.all_gather_columns(self._staging, x.contiguous())

    def all_gather_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        token_bytes = sum(x.element_size() * x.shape[1:].numel() for x in tensors)
        if (large := self._for_large(max(self.tokens_per_rank) * token_bytes)) is not None:
            return large.all_gather_tokens(*tensors)
        return cuda_impl.all_gather_tokens(self._staging, [x.contiguous() for x in tensors], self.tokens_per_rank)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if (large := self._for_large(x.nbytes // self.size)) is not None:  # the message to one rank, on average
            return large.reduce_scatter(x)
        return cuda_impl.reduce_scatter(self._staging, x.contiguous(), self.tokens_per_rank)

    def broadcast(self, x: Tensor) -> Tensor:
        if (large := self._for_large(x.nbytes)) is not None:
            return large.broadcast(x)
        return cuda_impl.broadcast(self._staging, x.contiguous())

    def barrier(self) -> None:
        """Also waits for the other streams of this device. Raises EngineStopped if the wait was aborted."""
        torch.cuda.synchronize()
        cuda_impl.barrier(self._staging)
        torch.cuda.synchronize()
        self._abort.check()

    def _for_large(self, nbytes: int) -> Collectives | None:
        """Returns the other collectives if a message of this size must use them. All ranks pass the same size."""
        if self._large is None or nbytes <= self._max_bytes:
            return None
        self._large.tokens_per_rank = self.tokens_per_rank
        return self._large


def allocate_staging(group: dist.ProcessGroup, device: torch.device, abort: AbortFlag, ranks_on_gpu: int) -> Staging:
    """Allocates the staging buffers of a group. Blocks until all its ranks have called this."""
    blocks = cuda_impl.blocks_of_a_rank(ranks_on_gpu)
    slot_bytes = cuda_impl.slot_bytes(ROUND_BYTES, blocks, group.size())
    memory = _SharedBuffers(group, cuda_impl.staging_bytes(blocks, slot_bytes), device)
    return Staging(memory.addresses, group.rank(), abort.word, blocks, slot_bytes, memory=memory)


def allocate_inboxes(group: dist.ProcessGroup, device: torch.device, abort: AbortFlag, ranks_on_gpu: int) -> Staging:
    """Allocates the buffers for `send` and `receive`. Blocks until all ranks of the group have called this."""
    blocks = cuda_impl.blocks_of_a_rank(ranks_on_gpu)
    slot_bytes = cuda_impl.slot_bytes(SEND_BYTES, blocks, 1)
    memory = _SharedBuffers(group, cuda_impl.inbox_bytes(blocks, slot_bytes, group.size()), device)
    return Staging(memory.addresses, group.rank(), abort.word, blocks, slot_bytes, memory=memory)


class _SharedBuffers:
    """One buffer of zeros per rank, which all ranks of a group can address. This object owns this rank's buffer."""

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self._own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._own.zero_()
        torch.cuda.synchronize(device)  # other ranks may write as soon as `rendezvous` has returned there
        self._handle = symmetric_memory.rendezvous(self._own, group)
        bases: list[int] = self._handle.buffer_ptrs
        # The buffer may be a part of an allocation. It then has the same offset in the allocations of all ranks.
        offset = self._own.data_ptr() - bases[group.rank()]
        self.addresses = torch.tensor([base + offset for base in bases], dtype=torch.int64, device=device)
