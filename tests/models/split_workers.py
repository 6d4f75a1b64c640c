"""A tiny model on several workers. Ranks are threads. Stages of a rank run in sequence, each with its own memory."""

import gc
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from harness import RandomWeights
from torch import Tensor

from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.resident import Batch, ResidentView, make_batch
from hotset.memory.tables import PageTables
from hotset.memory.view import Selected
from hotset.models.attention.dsa_spec import IndexSpec, MlaSpec
from hotset.models.attention.gqa_spec import GqaSpec
from hotset.models.checkpoint.weights import WeightSource
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.decoder import Decoder
from hotset.models.feed_forward import MoeSpec
from hotset.models.spec import AS_COMPUTED, ModelSpec, RopeSpec
from hotset.models.split import Split, TensorSlice

CPU = torch.device("cpu")
SEATS, CONTEXT, PAGE_ROWS = 3, 40, 8
BARRIER_TIMEOUT_S = 60
T = TypeVar("T")


def gqa_spec(architecture: str, attention: GqaSpec, tied: bool, mlp_bias: bool = False) -> ModelSpec:
    return ModelSpec(
        architecture, 61, 24, 4, 32, mlp_bias, 1e-6, tied, 96, RopeSpec(8), attention, None, "float64", (3,)
    )


def dsa_spec(architecture: str, layers: int, full_layers: tuple[int, ...], bias: bool, tied: bool) -> ModelSpec:
    index = IndexSpec(2, 8, topk=6, interleaved_rope=architecture == "glm_moe_dsa", full_layers=full_layers)
    attention = MlaSpec(4, 12, 16, 8, 4, 8, bias, index)
    moe = MoeSpec(8, 3, 8, shared=1, groups=2, topk_group=1, scale=1.5, normalise=True, layers=(1, 2, layers - 1))
    return ModelSpec(
        architecture, 61, 24, layers, 32, False, 1e-6, tied, 96, RopeSpec(4), attention, moe, "float64", (3,)
    )


SPECS = {
    "llama": gqa_spec("llama", GqaSpec(8, 4, 8), tied=False),
    "llama with biases": gqa_spec("llama", GqaSpec(8, 2, 8, qkv_bias=True, out_bias=True), tied=True, mlp_bias=True),
    "qwen3": gqa_spec("qwen3", GqaSpec(4, 2, 8, qk_norm=True), tied=True),
    "deepseek_v32": dsa_spec("deepseek_v32", 4, (0, 1, 2, 3), bias=False, tied=False),
    "glm_moe_dsa": dsa_spec("glm_moe_dsa", 5, (0, 1, 3), bias=True, tied=True),
}


class RecordingWeights(RandomWeights):
    """Random float32 weights. Records every requested tensor as a whole, even if only a slice is loaded."""

    def __init__(self) -> None:
        super().__init__(torch.float32, seed=11)
        self.tensors: dict[str, Tensor] = {}
        self.load_counts: Counter[str] = Counter()

    def load(
        self, name: str, shape: tuple[int, ...], *, out: Tensor | None = None, tensor_slice: TensorSlice | None = None
    ) -> Tensor:
        self.tensors[name] = super().load(name, shape)
        self.load_counts[name] += 1
        return super().load(name, shape, out=out, tensor_slice=tensor_slice)


class ThreadGroup:
    """The shared state through which the threads of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=BARRIER_TIMEOUT_S)
        self.tensors: list[Tensor | None] = [None] * size


class ThreadCollectives:
    """Implements `Collectives` among threads. Sums are taken in the order of ranks, so all ranks get the same bits."""

    def __init__(self, rank: int, group: ThreadGroup) -> None:
        self.rank, self.size = rank, group.size
        self.tokens_per_rank: Sequence[int] = ()
        self._group = group

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, in rank order."""
        self._group.tensors[self.rank] = x.clone()
        self._group.barrier.wait()
        tensors = [tensor.clone() for tensor in self._group.tensors if tensor is not None]
        self._group.barrier.wait()
        return tensors

    def all_reduce(self, x: Tensor) -> Tensor:
        total, *tensors = self._exchange(x)
        for tensor in tensors:
            assert tensor.shape == total.shape
            total += tensor
        x.fill_(torch.nan)  # collectives may overwrite their argument
        return total

    def all_gather_columns(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=1)

    def all_gather_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        return [self._gather_tokens(tensor) for tensor in tensors]

    def _gather_tokens(self, x: Tensor) -> Tensor:
        tensors = self._exchange(x)
        assert [len(tensor) for tensor in tensors] == list(self.tokens_per_rank)
        return torch.cat(tensors)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        assert x.shape[0] == sum(self.tokens_per_rank)
        return self.all_reduce(x).split(list(self.tokens_per_rank))[self.rank]

    def broadcast(self, x: Tensor) -> Tensor:
        of_rank_0 = self._exchange(x)[0]
        assert of_rank_0.shape == x.shape and of_rank_0.dtype == x.dtype
        return of_rank_0

    def barrier(self) -> None:
        self._group.barrier.wait()


def on_ranks(size: int, work: Callable[[ThreadCollectives], T]) -> list[T]:
    """Runs `work` in one thread per rank and returns the results by rank. Raises the first error of any rank."""
    group = ThreadGroup(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(ThreadCollectives(rank, group))
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            group.barrier.abort()  # the other ranks must not wait for this one

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class RecordingView(ResidentView):
    """Records the positions that every layer selects, and returns `padded` as `padded_seats`."""

    def __init__(self, memory: "Memory", batch: Batch, padded: Tensor | None) -> None:
        super().__init__(memory.pool, memory.tables, batch)
        self._selected = memory.selected
        self._padded = padded

    @property
    def padded_seats(self) -> Tensor | None:
        return self._padded

    def select(self, layer: int, positions: Tensor) -> Selected:
        self._selected.append(positions.clone())
        return super().select(layer, positions)


class Memory:
    """A device pool, filled with 0xAB, with pages for a full context on every seat."""

    def __init__(self, shape: KvShape, context: int = CONTEXT) -> None:
        geometry = shape.geometry(PAGE_ROWS)
        pages_per_seat = geometry.resident_pages(context)
        self.pool = DevicePool(shape, geometry, SEATS * pages_per_seat, CPU)
        self.pool.bytes.fill_(0xAB)
        self.tables = PageTables(SEATS, context, geometry, CPU)
        self.selected: list[Tensor] = []
        rows = geometry.row_pages(context)
        for seat in range(SEATS):
            pages = list(range(seat * pages_per_seat, (seat + 1) * pages_per_seat))
            self.tables.extend_rows(seat, 0, pages[:rows])
            self.tables.extend_keys(seat, 0, pages[rows:])


@dataclass(frozen=True)
class Step:
    """A step that computes `counts[i]` tokens of seat i from position `starts[i]`.

    `padded` has the seat of each token: EMPTY for padding, which is routed to no expert. None means that no token is
    padding. Logits are computed for the tokens `logit_indices`, or for all tokens if it is None.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    padded: Tensor | None = None
    logit_indices: Tensor | None = None

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def token_ids(self) -> Tensor:
        """The token ids, which depend only on seat and position."""
        numbers = [
            seat * 31 + start + offset for seat, (start, count) in enumerate(self._spans) for offset in range(count)
        ]
        return torch.tensor([(7 * number * number + 3 * number) % 61 for number in numbers])

    @property
    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, self.counts, strict=True))


# Step 0 computes three prompts. Step 1 continues the first prompt while the other two requests decode. Then all decode.
STEPS = [
    Step((0, 0, 0), (5, 1, 11)),
    Step((5, 1, 11), (9, 1, 1), logit_indices=torch.tensor([8, 10])),
    Step((14, 2, 12), (1, 1, 1)),
    Step((15, 3, 13), (1, 1, 1)),
]


@dataclass
class StepResults:
    """The results of `run_steps` on one rank."""

    logits: list[Tensor]  # by step
    selected: list[Tensor]  # the positions that each layer selected, in order of steps and layers
    memories: list[Memory]  # by stage
    stages: list[Decoder]


def build_stages(
    spec: ModelSpec,
    weights: WeightSource,
    layers: Sequence[range] | None = None,
    collectives: Collectives = SINGLE_RANK,
    data_parallel: bool = False,
) -> list[Decoder]:
    """Builds the pipeline stages of one rank. Stage i holds `layers[i]`; None means one stage with all layers."""
    rank, size = collectives.rank, collectives.size
    split = Split(dp_rank=rank, dp_size=size) if data_parallel else Split(tp_rank=rank, tp_size=size)
    splits = [split] if layers is None else [replace(split, layers=stage) for stage in layers]
    return [Decoder(spec, weights, AS_COMPUTED, stage, collectives) for stage in splits]


def parts_of(decoder: Decoder) -> list[Any]:
    """Returns the tensors and the objects of Hotset that the garbage collector finds in a decoder, each once."""
    parts: dict[int, Any] = {}
    queue: list[Any] = [decoder]
    while queue:
        part = queue.pop()
        known = isinstance(part, Tensor | list | tuple | dict) or type(part).__module__.startswith("hotset.")
        if known and id(part) not in parts:
            parts[id(part)] = part
            queue += [] if isinstance(part, Tensor) else gc.get_referents(part)
    return list(parts.values())


@torch.inference_mode()
def run_steps(
    stages: list[Decoder], steps: Sequence[Step | None], tokens_per_rank: Sequence[Sequence[int]] = ()
) -> StepResults:
    """Runs the steps on one rank. None stands for a step in which only other ranks have tokens.

    For data parallel ranks, `tokens_per_rank` has the number of tokens of every rank, one list per step.
    """
    memories = [Memory(stage.kv_shape) for stage in stages]
    logits, selected = [], []
    for number, step in enumerate(steps):
        if tokens_per_rank:
            stages[0]._collectives.tokens_per_rank = tokens_per_rank[number]
        if step is None:
            for stage in stages:
                stage.idle_moe_step()
            continue
        batch = make_batch(range(len(step.counts)), step.starts, step.counts, CPU)
        x = stages[0].embed(step.token_ids)
        for stage, memory in zip(stages, memories, strict=True):
            x = stage.run_layers(x, RecordingView(memory, batch, step.padded))
            selected += memory.selected
            memory.selected.clear()
        logits.append(stages[-1].logits(x, step.logit_indices))
    return StepResults(logits, selected, memories, stages)
