"""Compares the collective kernels, which run on the CPU with ranks as threads, with plain sums in rank order."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
import torch
from kernels import cuda_on_cpu
from kernels.collective_ranks import DEADLINE_S, Ranks, emulated_kernels
from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.collectives import cuda_impl, reference
from hotset.kernels.collectives.cuda_impl import Staging

pytestmark = cuda_on_cpu.needs_compiler
ALWAYS_TWO_SHOTS = -1


@pytest.fixture(autouse=True)
def kernels_on_cpu() -> Iterator[None]:
    with emulated_kernels():
        yield


def one_shot_up_to(nbytes: int, size: int) -> int:
    return size * (size - 2) * nbytes


def randn(*shape: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Returns random values whose address is not aligned if `offset` is not 0."""
    count = torch.Size(shape).numel()
    return torch.randn(offset + count, dtype=torch.float64).to(dtype)[offset:].view(shape)


class Call:
    """One collective call of all ranks: the arguments of each, and what the reference returns to each."""

    def __init__(self, size: int, dtype: torch.dtype, rng: random.Random) -> None:
        self.operation = rng.choice(["all_reduce", "reduce_scatter", "columns", "tokens", "broadcast", "barrier"])
        self.width, self.offset = rng.choice([1, 3, 8, 24, 40]), rng.choice([0, 0, 1])
        self.tokens = [rng.choice([0, 1, 2, 7]) for _ in range(size)]
        self.delays = [rng.choice([0, 0, 0.001]) for _ in range(size)]
        rows = sum(self.tokens) if self.operation == "reduce_scatter" else rng.choice([0, 1, 2, 5, 11])
        self.parts = [randn(rows, self.width, dtype=dtype, offset=self.offset) for _ in range(size)]
        self.ids = [torch.randint(0, 1 << 40, (count, 3)) for count in self.tokens]
        self.hidden = [randn(count, self.width, dtype=dtype, offset=self.offset) for count in self.tokens]

    def run(self, staging: Staging) -> list[Tensor]:
        rank = staging.rank
        time.sleep(self.delays[rank])
        if self.operation == "all_reduce":
            # Copied to memory of the same alignment, because the sum replaces its argument.
            result = torch.empty(self.offset + self.parts[rank].numel(), dtype=self.parts[rank].dtype)
            result = result[self.offset :].view_as(self.parts[rank]).copy_(self.parts[rank])
            cuda_impl.all_reduce(staging, result)
            return [result]
        if self.operation == "reduce_scatter":
            return [cuda_impl.reduce_scatter(staging, self.parts[rank], self.tokens)]
        if self.operation == "columns":
            return [cuda_impl.all_gather_columns(staging, self.parts[rank])]
        if self.operation == "tokens":
            return cuda_impl.all_gather_tokens(staging, [self.hidden[rank], self.ids[rank]], self.tokens)
        if self.operation == "broadcast":
            return [cuda_impl.broadcast(staging, self.parts[rank])]
        cuda_impl.barrier(staging)
        return []

    def expected(self, rank: int) -> list[Tensor]:
        if self.operation == "all_reduce":
            return [reference.all_reduce(self.parts)]
        if self.operation == "reduce_scatter":
            return [reference.reduce_scatter(self.parts, self.tokens, rank)]
        if self.operation == "columns":
            return [reference.all_gather_columns(self.parts)]
        if self.operation == "tokens":
            return [reference.all_gather_tokens(self.hidden), reference.all_gather_tokens(self.ids)]
        if self.operation == "broadcast":
            return [reference.broadcast(self.parts)]
        return []


def bits(tensors: Sequence[Tensor]) -> list[list[int]]:
    return [tensor.contiguous().view(torch.uint8).flatten().tolist() for tensor in tensors]


def check_calls(ranks: Ranks, calls: Sequence[Call]) -> None:
    results = ranks.run(lambda rank: [call.run(ranks.staging[rank]) for call in calls])
    for rank, of_rank in enumerate(results):
        for number, (call, result) in enumerate(zip(calls, of_rank, strict=True)):
            expected = call.expected(rank)
            where = f"call {number} ({call.operation}) of rank {rank}"
            assert [tensor.shape for tensor in result] == [tensor.shape for tensor in expected], where
            assert bits(result) == bits(expected), where


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (3, torch.bfloat16),
        pytest.param(2, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(3, torch.float32, marks=pytest.mark.slow),
        pytest.param(4, torch.float64, marks=pytest.mark.slow),
        pytest.param(8, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_alternating_calls_of_random_sizes_give_the_bits_of_sums_in_rank_order(size: int, dtype: torch.dtype) -> None:
    """Slots hold few tokens, so most calls take several rounds. Flags wrap around after a few of them."""
    torch.manual_seed(size)
    rng = random.Random(size)
    calls = [Call(size, dtype, rng) for _ in range(40)]
    with mock.patch.object(cuda_impl, "ONE_SHOT_EXTRA_BYTES", one_shot_up_to(200, size) or ALWAYS_TWO_SHOTS):
        check_calls(Ranks(size, sequence=-20), calls)


@pytest.mark.parametrize("most", [1 << 20, ALWAYS_TWO_SHOTS], ids=["one shot", "two shots"])
def test_sums_are_added_in_the_order_of_the_ranks_and_rounded_once(most: int) -> None:
    cases = {(1.0, 2.0**-8, 2.0**-8): 1 + 2.0**-7, (2.0**-30, 1.0, -1.0): 0.0, (1.0, -1.0, 2.0**-30): 2.0**-30}
    for values, expected in cases.items():
        ranks, parts = Ranks(3), [torch.full((100,), value, dtype=torch.bfloat16) for value in values]
        assert reference.all_reduce(parts).tolist() == [expected] * 100
        with mock.patch.object(cuda_impl, "ONE_SHOT_EXTRA_BYTES", most):
            ranks.run(lambda rank, ranks=ranks, parts=parts: cuda_impl.all_reduce(ranks.staging[rank], parts[rank]))
        assert all(part.tolist() == [expected] * 100 for part in parts)


@pytest.mark.parametrize(
    ("size", "kib", "name"), [(2, 1 << 20, "one"), (4, 768, "one"), (4, 769, "two"), (8, 129, "two")]
)
def test_more_than_two_ranks_reduce_large_messages_in_two_shots(size: int, kib: int, name: str) -> None:
    x, launched = torch.empty(kib << 10, dtype=torch.uint8, device="meta").view(torch.float32), []
    staging = Staging(torch.zeros(size, dtype=torch.int64), 0, torch.zeros(1, dtype=torch.int32))
    with mock.patch.object(cuda_impl, "_launch", lambda _staging, _source, kernel, *_, **__: launched.append(kernel)):
        cuda_impl.all_reduce(staging, x)
    assert launched == [f"all_reduce_{name}_shot"]


def test_tensors_pass_between_workers_in_order_and_both_directions() -> None:
    rng, size = random.Random(3), 3
    torch.manual_seed(3)
    ranks = Ranks(size, sequence=-5)
    routes = [rng.choice([(0, 1), (1, 2), (2, 0), (0, 2)]) for _ in range(30)]
    sent = [randn(rng.choice([0, 1, 7, 60, 200]), dtype=torch.bfloat16, offset=rng.choice([0, 1])) for _ in routes]
    received = [torch.full_like(x, torch.nan) for x in sent]

    def run(rank: int) -> None:
        for (source, to), x, out in zip(routes, sent, received, strict=True):
            if rank == source:
                cuda_impl.send(ranks.inboxes[rank], x, to)
            elif rank == to:
                cuda_impl.receive(ranks.inboxes[rank], out, source)

    ranks.run(run)
    assert bits(received) == bits(sent)


def test_a_sender_does_not_wait_for_a_receiver_that_is_less_than_two_chunks_behind() -> None:
    ranks, x = Ranks(3, slot_bytes=96), torch.arange(48.0)  # it fills a slot of each of the 2 blocks
    ranks.run(lambda rank: [cuda_impl.send(ranks.inboxes[0], x + i, 1) for i in range(2)], ranks=[0])
    out = [torch.empty(48), torch.empty(48)]
    ranks.run(lambda rank: [cuda_impl.receive(ranks.inboxes[1], tensor, 0) for tensor in out], ranks=[1])
    assert torch.equal(out[0], x) and torch.equal(out[1], x + 1)


def bf16_ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


WAITING_CALLS: dict[str, Callable[[Ranks, int], object]] = {
    "all_reduce": lambda ranks, rank: cuda_impl.all_reduce(ranks.staging[rank], bf16_ones(100)),
    "reduce_scatter": lambda ranks, rank: cuda_impl.reduce_scatter(ranks.staging[rank], bf16_ones(3, 9), [1, 1, 1]),
    "columns": lambda ranks, rank: cuda_impl.all_gather_columns(ranks.staging[rank], bf16_ones(9, 9)),
    "tokens": lambda ranks, rank: cuda_impl.all_gather_tokens(ranks.staging[rank], [bf16_ones(1, 9)], [1, 1, 1]),
    "barrier": lambda ranks, rank: cuda_impl.barrier(ranks.staging[rank]),
}


@pytest.mark.parametrize("operation", WAITING_CALLS)
def test_the_abort_flag_ends_the_waits_for_a_rank_that_never_arrives(operation: str) -> None:
    ranks = Ranks(3)

    def abort_when_both_wait() -> None:
        for rank in (0, 1):
            ranks.wait_for_flag(at=2, source=rank)
        ranks.abort.fill_(1)

    def run(rank: int) -> int:
        WAITING_CALLS[operation](ranks, rank)
        was_set = int(ranks.abort.item())
        WAITING_CALLS[operation](ranks, rank)  # a later call does not wait either
        return was_set

    aborting = threading.Thread(target=abort_when_both_wait, daemon=True)
    aborting.start()
    assert ranks.run(run, ranks=[0, 1]) == [1, 1], "a call returned before the flag was set"
    aborting.join(DEADLINE_S)


@pytest.mark.parametrize("operation", ["send", "receive"])
def test_the_abort_flag_ends_the_waits_between_stages(operation: str) -> None:
    ranks, x = Ranks(3), torch.ones(1000)  # many chunks
    timer = threading.Timer(0.05, lambda: ranks.abort.fill_(1))
    timer.start()
    transfer = cuda_impl.send if operation == "send" else cuda_impl.receive
    ranks.run(lambda rank: transfer(ranks.inboxes[0], x, 1), ranks=[0])
    assert ranks.abort.item() == 1, "the call returned before the flag was set"


def test_sums_of_other_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"support torch.float32, torch.bfloat16, torch.float64, not torch.float16"):
        cuda_impl.all_reduce(Ranks(2).staging[0], torch.ones(2, dtype=torch.float16))


@pytest.mark.parametrize("ranks_on_gpu", [1, 2, 3, 4, 8, 16])
def test_the_waiting_blocks_of_all_ranks_of_a_gpu_leave_room_for_other_kernels(ranks_on_gpu: int) -> None:
    """An H200 has 132 multiprocessors, and a block occupies at most one of them."""
    blocks = cuda_impl.blocks_of_a_rank(ranks_on_gpu)
    assert blocks >= 1 and blocks * ranks_on_gpu <= 132 // 4
    assert cuda_impl.slot_bytes(cuda_impl.ROUND_BYTES, blocks, ranks_on_gpu) >= 16 * ranks_on_gpu
