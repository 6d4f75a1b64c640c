"""A model that is split over workers gives the same logits as the whole model, in float64, for every split."""

from typing import Any

import pytest
import torch
from harness import RandomWeights
from split_workers import SPECS, STEPS, Answers, Step, answers, on_ranks, worker
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.models.checkpoint.source import TensorSlice
from hotset.models.collectives import SINGLE_RANK
from hotset.models.spec import MlaSpec
from hotset.models.split import stage_layers

DSA = [name for name, spec in SPECS.items() if isinstance(spec.attention, MlaSpec)]
WHOLE: dict[str, Answers] = {}


def weights() -> RandomWeights:
    return RandomWeights(torch.float64, seed=11)


def whole(name: str) -> Answers:
    if name not in WHOLE:
        WHOLE[name] = answers(worker(SPECS[name], weights()), STEPS)
    return WHOLE[name]


def expect_same(found: Answers, expected: Answers) -> None:
    assert len(found.logits) == len(expected.logits)
    for mine, theirs in zip(found.logits, expected.logits, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == torch.float64
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    assert len(found.selected) == len(expected.selected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.selected, expected.selected, strict=True))


def expect_same_bits(of_ranks: list[Answers]) -> None:
    for other in of_ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(of_ranks[0].logits, other.logits, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(of_ranks[0].selected, other.selected, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SPECS)
def test_tensor_parallel_ranks_agree_bitwise_and_match_the_whole_model(name: str, ranks: int) -> None:
    found = on_ranks(ranks, lambda peers: answers(worker(SPECS[name], weights(), None, peers), STEPS))
    for mine in found:
        expect_same(mine, whole(name))
    expect_same_bits(found)


@pytest.mark.parametrize("name", DSA)
def test_tensor_parallel_ranks_write_the_same_latent_rows_and_index_keys(name: str) -> None:
    """They must agree bitwise: they share one host store, and any of them may write a page to it."""
    found = on_ranks(4, lambda peers: answers(worker(SPECS[name], weights(), None, peers), STEPS))
    written = [mine.memories[0].pool.bytes for mine in found]
    assert all(torch.equal(written[0], other) for other in written[1:])
    assert (written[0] != 0xAB).any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_the_rows_of_its_own_kv_heads(ranks: int) -> None:
    """Of 2 KV heads, ranks 0 and 1 of 4 hold the first, ranks 2 and 3 the second."""
    name = "llama with biases"
    found = on_ranks(ranks, lambda peers: answers(worker(SPECS[name], weights(), None, peers), STEPS))
    all_rows = whole(name).memories[0].pool.rows.unflatten(-1, (2, 2, -1))  # [layers, rows, K or V, head, values]
    written = all_rows[:, :, 0, 0, 0] != torch.full((1, 8), 0xAB, dtype=torch.uint8).view(torch.float64)
    assert written.any() and not written.all()
    for rank, mine in enumerate(found):
        rows = mine.memories[0].pool.rows.unflatten(-1, (2, 1, -1))
        head = rank * 2 // ranks
        torch.testing.assert_close(rows[written][:, :, 0], all_rows[written][:, :, head], rtol=1e-10, atol=1e-10)


class Tied(RandomWeights):
    """Weights with which the indexer gives every position the score 0."""

    def load(self, name: str, *args: Any, tensor_slice: TensorSlice | None = None, out: Tensor | None = None) -> Tensor:
        loaded = super().load(name, *args, tensor_slice=tensor_slice, out=out)
        return loaded.zero_() if "indexer.weights_proj" in name else loaded


@pytest.mark.parametrize("name", DSA)
def test_ties_between_positions_are_broken_the_same_way_on_every_rank(name: str) -> None:
    def tied() -> Tied:
        return Tied(torch.float64, seed=11)

    found = on_ranks(4, lambda peers: answers(worker(SPECS[name], tied(), None, peers), STEPS))
    for mine in found:
        expect_same(mine, answers(worker(SPECS[name], tied()), STEPS))
    expect_same_bits(found)
    assert found[3].selected[-1][2].tolist() == list(range(6))  # of equals the earlier ones


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (1, 2, 1), "heaviest"])
@pytest.mark.parametrize("name", SPECS)
def test_stages_match_the_whole_model(name: str, counts: Any) -> None:
    spec = SPECS[name]
    if counts == "heaviest":
        layers = stage_layers(spec, 3)
    elif name == "glm_moe_dsa":
        layers = stage_layers(spec, len(counts), {2: (3, 2), 3: (1, 2, 2)}[len(counts)])
    else:
        layers = stage_layers(spec, len(counts), counts)
    found = answers(worker(spec, weights(), layers), STEPS)
    expect_same(found, whole(name))
    assert [stage.first for stage in found.stages] == [True] + [False] * (len(layers) - 1)
    assert [stage.last for stage in found.stages] == [False] * (len(layers) - 1) + [True]
    assert [stage.kv_shape.layers for stage in found.stages] == [len(stage) for stage in layers]


@pytest.mark.parametrize(("name", "stages", "ranks"), [("glm_moe_dsa", 2, 2), ("llama with biases", 3, 4)])
def test_stages_of_several_ranks_match_the_whole_model(name: str, stages: int, ranks: int) -> None:
    layers = stage_layers(SPECS[name], stages)
    found = on_ranks(ranks, lambda peers: answers(worker(SPECS[name], weights(), layers, peers), STEPS))
    for mine in found:
        expect_same(mine, whole(name))
    expect_same_bits(found)


def test_index_groups_are_numbered_within_their_stage() -> None:
    layers = stage_layers(SPECS["glm_moe_dsa"], 2, (1, 4))
    first, second = worker(SPECS["glm_moe_dsa"], weights(), layers)
    assert first.kv_shape.key_layers == (0,) and second.kv_shape.key_layers == (0, 2)
    assert second.kv_shape.topk == 6 and second.kv_shape.key == first.kv_shape.key


REQUESTS: list[list[Step | None]] = [
    [Step((0, 0), (5, 3)), Step((5, 3), (1, 1)), None, Step((6,), (2,))],
    [Step((0,), (13,)), None, Step((13,), (1,)), Step((14, 0, 0), (1, 4, 2))],
]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", [*DSA, "qwen3"])
def test_data_parallel_ranks_match_a_single_rank(name: str, stages: int) -> None:
    """The ranks' steps have different numbers of tokens, and some have none."""
    spec = SPECS[name]
    layers = stage_layers(spec, stages)
    tokens = [[0 if step is None else step.tokens for step in steps] for steps in zip(*REQUESTS, strict=True)]
    found = on_ranks(
        2,
        lambda peers: answers(worker(spec, weights(), layers, peers, data_parallel=True), REQUESTS[peers.rank], tokens),
    )
    for mine, steps in zip(found, REQUESTS, strict=True):
        alone = answers(worker(spec, weights(), layers), [step for step in steps if step is not None])
        expect_same(mine, alone)


@pytest.mark.parametrize("data_parallel", [False, True])
def test_padding_goes_to_no_expert_of_any_rank(data_parallel: bool) -> None:
    """Only one rank has padded its batch; every rank sends its seats."""
    spec = SPECS["deepseek_v32"]
    seats = torch.tensor([0, EMPTY, EMPTY, 0])
    padded, plain = Step((0,), (4,), padded=seats), Step((0,), (4,))
    expected = [answers(worker(spec, weights()), [step]) for step in (padded, plain)]
    assert not torch.allclose(expected[0].logits[0], expected[1].logits[0])
    steps = [[padded], [plain if data_parallel else padded]]
    found = on_ranks(
        2, lambda peers: answers(worker(spec, weights(), None, peers, data_parallel), steps[peers.rank], [[4, 4]])
    )
    expect_same(found[0], expected[0])
    expect_same(found[1], expected[1 if data_parallel else 0])


def storages(part: Any, seen: dict[int, int]) -> dict[int, int]:
    """Collects the bytes of all memory that `part` and its attributes hold, by address."""
    if isinstance(part, Tensor):
        seen[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    elif isinstance(part, (list, tuple)):
        for item in part:
            storages(item, seen)
    elif type(part).__module__.startswith("hotset."):
        for name in [*getattr(part, "__dict__", ()), *getattr(type(part), "__slots__", ())]:
            storages(getattr(part, name), seen)
    return seen


def held_bytes(part: Any) -> int:
    return sum(storages(part, {}).values())


@pytest.mark.parametrize("name", SPECS)
def test_a_rank_holds_its_shard_and_a_stage_its_layers(name: str) -> None:
    spec = SPECS[name]
    (alone,) = worker(spec, weights())
    all_bytes = held_bytes(alone)
    of_four = on_ranks(4, lambda peers: held_bytes(worker(spec, weights(), None, peers)))
    # Every rank holds norms, routers, latent projections and the indexer; in this tiny model they are a large share.
    assert max(of_four) < (0.55 if name in DSA else 0.4) * all_bytes
    of_stages = [held_bytes(stage) for stage in worker(spec, weights(), stage_layers(spec, 2))]
    twice = alone._embedding.weight.nbytes if spec.tied_embeddings and alone._embedding else 0
    assert sum(of_stages) <= all_bytes + twice + held_bytes(alone._rope) and max(of_stages) < 0.7 * all_bytes


@pytest.mark.parametrize("name", DSA)
def test_data_parallel_ranks_hold_only_their_own_experts(name: str) -> None:
    spec = SPECS[name]
    assert spec.moe is not None
    (alone,) = worker(spec, weights())
    expert_bytes = len(spec.moe.layers) * spec.moe.experts * 3 * spec.moe.width * spec.hidden * 8
    of_four = on_ranks(4, lambda peers: held_bytes(worker(spec, weights(), None, peers, data_parallel=True)))
    numbers = len(spec.moe.layers) * (spec.moe.experts + 1) * 8
    assert of_four == [held_bytes(alone) - 3 * expert_bytes // 4 + numbers] * 4


def test_collectives_of_a_single_rank_return_their_argument() -> None:
    x = torch.randn(3, 2)
    alone = SINGLE_RANK
    ops = (alone.all_reduce, alone.all_gather_columns, alone.all_gather_tokens, alone.reduce_scatter)
    assert all(op(x) is x for op in ops)
