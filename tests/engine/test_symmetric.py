"""Tests SymmetricCollectives with kernels that run on the CPU, and the choice of a `World`. Ranks are threads."""

from collections import Counter
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from kernels import cuda_on_cpu
from kernels.collective_ranks import Ranks, emulated_kernels
from torch import Tensor

from hotset.base.engine_settings import CollectivesChoice
from hotset.base.errors import EngineStopped
from hotset.engine.workers import distributed
from hotset.engine.workers.distributed import DistributedCollectives, make_world
from hotset.engine.workers.messages import WorkerRank
from hotset.engine.workers.symmetric import AbortFlag, SymmetricCollectives
from hotset.kernels.collectives import reference
from hotset.models.collectives import Collectives
from hotset.models.split import Split

CPU = torch.device("cpu")


@pytest.fixture
def kernels_on_cpu() -> Iterator[None]:
    if cuda_on_cpu.COMPILER is None:
        pytest.skip("no C++ compiler")
    with emulated_kernels(), mock.patch.object(torch.cuda, "synchronize"):
        yield


class Recorded:
    """Implements `Collectives` for large messages. Records the name and the size of each call."""

    rank, size = 0, 2
    tokens_per_rank: Sequence[int] = ()

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def _record(self, name: str, x: Tensor) -> Tensor:
        self.calls.append((name, x.nbytes))
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._record("all_reduce", x)

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return self._record("all_gather_columns", x)

    def all_gather_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        return [self._record("all_gather_tokens", x) for x in tensors]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._record(f"reduce_scatter {list(self.tokens_per_rank)}", x)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._record("broadcast", x)

    def barrier(self) -> None:
        raise AssertionError("a barrier is not a large message")


def group(ranks: Ranks, large: Collectives | None = None) -> list[SymmetricCollectives]:
    abort = AbortFlag(CPU)
    abort.word = ranks.abort
    return [SymmetricCollectives(staging, abort, large, max_bytes=64) for staging in ranks.staging]


@pytest.mark.usefixtures("kernels_on_cpu")
def test_every_collective_of_ranks_with_unequal_tokens_gives_the_result_of_the_reference() -> None:
    ranks, tokens = Ranks(3), [2, 0, 3]
    members = group(ranks)
    parts = [torch.randn(6, 5).to(torch.bfloat16).t() for _ in range(3)]  # [5, 6], not contiguous
    own = [(torch.randn(count, 4), torch.arange(count)[:, None]) for count in tokens]

    def run(rank: int) -> list[Tensor]:
        member = members[rank]
        member.tokens_per_rank = tokens
        member.barrier()
        return [
            member.all_reduce(parts[rank].t().clone().t()),
            member.all_gather_columns(parts[rank]),
            *member.all_gather_tokens(*own[rank]),
            member.reduce_scatter(parts[rank]),
            member.broadcast(parts[rank]),
        ]

    for rank, results in enumerate(ranks.run(run)):
        expected = [
            reference.all_reduce(parts),
            reference.all_gather_columns(parts),
            *(reference.all_gather_tokens(tensors) for tensors in zip(*own, strict=True)),
            reference.reduce_scatter(parts, tokens, rank),
            parts[0],
        ]
        for result, tensor in zip(results, expected, strict=True):
            assert torch.equal(result, tensor)


def test_between_gpus_all_ranks_send_large_messages_over_the_other_collectives() -> None:
    """A rank without tokens decides like the others. Nothing is launched here."""
    large = Recorded()
    for member in group(Ranks(2), large):
        member.tokens_per_rank = [9, 0]
        own = torch.zeros([9, 0][member.rank], 4)
        member.all_reduce(torch.zeros(17))
        member.all_gather_columns(torch.zeros(1, 17))
        member.all_gather_tokens(own)
        member.reduce_scatter(torch.zeros(9, 4))
        member.broadcast(torch.zeros(17))
    names = ["all_reduce", "all_gather_columns", "all_gather_tokens", "reduce_scatter [9, 0]", "broadcast"]
    assert [name for name, _ in large.calls] == names * 2


@pytest.mark.usefixtures("kernels_on_cpu")
def test_a_barrier_whose_wait_was_aborted_raises() -> None:
    ranks = Ranks(3)
    ranks.abort.fill_(1)
    with pytest.raises(EngineStopped, match="aborted"):
        ranks.run(lambda rank: group(ranks)[rank].barrier(), ranks=[0])


def test_the_abort_flag_stays_set_and_its_check_raises() -> None:
    flag = AbortFlag(CPU)
    flag.check()
    flag.set()
    assert flag.is_set and flag.word.item() == 1
    for _ in range(2):
        with pytest.raises(EngineStopped, match="steps in flight were aborted"):
            flag.check()


@pytest.mark.parametrize(
    ("device", "ranks_on_gpu", "collectives", "world"),
    [
        ("cpu", 1, "auto", "DistributedWorld"),
        ("cuda:0", 1, "auto", "DistributedWorld"),
        ("cuda:0", 2, "auto", "SymmetricWorld"),
        ("cuda:0", 2, "nccl", "DistributedWorld"),
    ],
)
def test_workers_that_share_a_gpu_share_memory(
    device: str, ranks_on_gpu: int, collectives: CollectivesChoice, world: str
) -> None:
    rank = WorkerRank(0, 2, 0, 1, Split(0, 2), "rendezvous", device, ranks_on_gpu=ranks_on_gpu)
    worlds = ("DistributedWorld", "SymmetricWorld")
    made = {name: mock.Mock(name=name) for name in worlds}
    with mock.patch.multiple(distributed, **made):
        assert make_world(rank, torch.device(device), collectives) is made[world].return_value


@pytest.mark.parametrize(
    ("indices", "peers", "obstacle"),
    [
        ([0, 0, 0], [], None),
        ([0, 1, 0], [(0, 1), (1, 0)], None),
        ([0, 1, 2], [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)], "GPU 2 has no peer access to GPU 1"),
        ([0] * 17, [], "symmetric memory supports 16 ranks, not 17"),
    ],
)
def test_symmetric_memory_needs_peer_access(
    indices: list[int], peers: list[tuple[int, int]], obstacle: str | None
) -> None:
    members = mock.Mock()
    members.size.return_value = len(indices)

    def gather(out: list[tuple[str, int]], _own: tuple[str, int], group: object) -> None:
        out[:] = [("node", index) for index in indices]

    with (
        mock.patch.object(distributed.dist, "all_gather_object", gather),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in peers),
    ):
        assert distributed._obstacle_to_symmetric_memory(members, torch.device("cuda:0"), "node") == obstacle


def test_a_single_token_of_all_ranks_is_gathered_with_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has 76 bytes, which is no multiple of the 8 bytes of an id of an expert."""
    ranks = DistributedCollectives(mock.Mock(), 0, 2, CPU)
    ranks.tokens_per_rank = [1, 0]
    monkeypatch.setattr(ranks, "_all_gather", lambda x: torch.stack([x, torch.zeros_like(x)]))
    tensors = torch.randn(1, 10), torch.tensor([[5, 1 << 40, 7]]), torch.randn(1, 3)
    for result, tensor in zip(ranks.all_gather_tokens(*tensors), tensors, strict=True):
        assert result.dtype == tensor.dtype and torch.equal(result, tensor)


@pytest.mark.parametrize(
    ("split", "stages", "expected"),
    [
        ({"tp_rank": 1, "tp_size": 2}, 1, {"all_gather_into_tensor": 4, "broadcast": 2, "barrier": 1}),
        ({"dp_rank": 1, "dp_size": 2}, 1, {"all_gather_into_tensor": 2, "all_to_all_single": 2, "barrier": 1}),
        ({}, 3, {"recv": 2, "send": 2}),
    ],
    ids=["tensor", "data", "pipeline"],
)
def test_every_kind_of_message_is_exchanged_when_workers_connect(
    split: dict[str, int], stages: int, expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL takes memory at the first message of each kind: before the memory for KV is measured."""
    fake = mock.Mock()
    monkeypatch.setattr(distributed, "dist", fake)
    monkeypatch.setattr(distributed, "_join_group", lambda *_: distributed._Joined(mock.Mock(), mock.Mock()))
    monkeypatch.setattr(distributed, "FIRST_MESSAGES_GLOO", (1 << 10, 1 << 12))
    of_model = Split(**split)
    number = of_model.rank if stages == 1 else 1
    rank = WorkerRank(number, stages * of_model.size, number * (stages > 1), stages, of_model, "rendezvous", "cpu")
    world = distributed.DistributedWorld(rank, CPU)
    calls = [call[0] for call in fake.method_calls]
    assert Counter(calls) == expected
    assert world.collectives.tokens_per_rank == ()
    if stages > 1:
        assert calls == ["recv", "send"] * 2
        assert [call.args[1] for call in fake.recv.call_args_list] == [0, 0]
        assert [call.args[1] for call in fake.send.call_args_list] == [2, 2]
        assert [call.args[0].nbytes for call in fake.send.call_args_list] == [1 << 10, 1 << 12]
