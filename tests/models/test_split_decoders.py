"""A model that is split over workers computes the logits of the whole model, within 1e-10 in float64."""

from typing import Any

import pytest
import torch
from harness import RandomWeights
from matrix import matrix
from split_workers import SPECS, STEPS, Step, StepResults, build_stages, on_ranks, run_steps
from torch import Tensor

from hotset.kernels import EMPTY
from hotset.models.allowed_splits import stage_layers
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.split import TensorSlice

DSA = [name for name, spec in SPECS.items() if isinstance(spec.attention, MlaSpec)]
STAGES: list[Any] = [[2, 2], [3, 1], [1, 2, 1], "balanced"]  # layers of each stage
WHOLE: dict[str, StepResults] = {}  # the results of whole models, by name


def weights() -> RandomWeights:
    return RandomWeights(torch.float64, seed=11)


def whole(name: str) -> StepResults:
    if name not in WHOLE:
        WHOLE[name] = run_steps(build_stages(SPECS[name], weights()), STEPS)
    return WHOLE[name]


def expect_close(found: StepResults, expected: StepResults) -> None:
    assert len(found.logits) == len(expected.logits)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert len(found.selected) == len(expected.selected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.selected, expected.selected, strict=True))


def expect_same_bits(ranks: list[StepResults]) -> None:
    for rank in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0].logits, rank.logits, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(ranks[0].selected, rank.selected, strict=True))


@pytest.mark.parametrize(("name", "ranks"), matrix([*SPECS], [2, 4], together=1))
def test_tensor_parallel_ranks_agree_bitwise_and_match_the_whole_model(name: str, ranks: int) -> None:
    found = on_ranks(ranks, lambda peers: run_steps(build_stages(SPECS[name], weights(), None, peers), STEPS))
    for rank_result in found:
        expect_close(rank_result, whole(name))
    expect_same_bits(found)


@pytest.mark.parametrize("name", DSA)
def test_tensor_parallel_ranks_write_the_same_latent_rows_and_index_keys(name: str) -> None:
    """The bytes must be the same: the ranks share one host store, and each of its pages is written by one rank only."""
    found = on_ranks(4, lambda peers: run_steps(build_stages(SPECS[name], weights(), None, peers), STEPS))
    written = [rank.memories[0].pool.bytes for rank in found]
    assert all(torch.equal(written[0], pool_bytes) for pool_bytes in written[1:])
    assert (written[0] != 0xAB).any()


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_has_the_rows_of_its_own_kv_heads(ranks: int) -> None:
    """If 4 ranks share 2 KV heads, ranks 0 and 1 hold the first head, and ranks 2 and 3 hold the second head."""
    name = "llama with biases"
    found = on_ranks(ranks, lambda peers: run_steps(build_stages(SPECS[name], weights(), None, peers), STEPS))
    all_rows = whole(name).memories[0].pool.rows.unflatten(-1, (2, 2, -1))  # [layers, rows, K or V, head, values]
    written = all_rows[:, :, 0, 0, 0] != torch.full((1, 8), 0xAB, dtype=torch.uint8).view(torch.float64)
    assert written.any() and not written.all()
    for rank, rank_result in enumerate(found):
        rows = rank_result.memories[0].pool.rows.unflatten(-1, (2, 1, -1))
        head = rank * 2 // ranks
        torch.testing.assert_close(rows[written][:, :, 0], all_rows[written][:, :, head], rtol=1e-10, atol=1e-10)


class TiedScores(RandomWeights):
    """Weights that make every score of the indexer 0."""

    def load(self, name: str, *args: Any, tensor_slice: TensorSlice | None = None, out: Tensor | None = None) -> Tensor:
        loaded = super().load(name, *args, tensor_slice=tensor_slice, out=out)
        return loaded.zero_() if "indexer.weights_proj" in name else loaded


@pytest.mark.parametrize("name", DSA)
def test_ties_between_positions_are_broken_the_same_way_on_every_rank(name: str) -> None:
    def tied() -> TiedScores:
        return TiedScores(torch.float64, seed=11)

    found = on_ranks(4, lambda peers: run_steps(build_stages(SPECS[name], tied(), None, peers), STEPS))
    expect_close(found[0], run_steps(build_stages(SPECS[name], tied()), STEPS))
    expect_same_bits(found)
    assert found[3].selected[-1][2].tolist() == list(range(6))  # the earlier positions win


@pytest.mark.parametrize(("name", "counts"), matrix([*SPECS], STAGES, together=1))
def test_stages_match_the_whole_model(name: str, counts: Any) -> None:
    spec = SPECS[name]
    if counts == "balanced":
        layers = stage_layers(spec, 3)
    elif name == "glm_moe_dsa":
        layers = stage_layers(spec, len(counts), {2: (3, 2), 3: (1, 2, 2)}[len(counts)])
    else:
        layers = stage_layers(spec, len(counts), tuple(counts))
    found = run_steps(build_stages(spec, weights(), layers), STEPS)
    expect_close(found, whole(name))
    assert [stage.first for stage in found.stages] == [True] + [False] * (len(layers) - 1)
    assert [stage.last for stage in found.stages] == [False] * (len(layers) - 1) + [True]
    assert [stage.kv_shape.layers for stage in found.stages] == [len(stage) for stage in layers]


@pytest.mark.parametrize(("name", "stages", "ranks"), [("glm_moe_dsa", 2, 2), ("llama with biases", 3, 4)])
def test_stages_of_several_ranks_match_the_whole_model(name: str, stages: int, ranks: int) -> None:
    layers = stage_layers(SPECS[name], stages)
    found = on_ranks(ranks, lambda peers: run_steps(build_stages(SPECS[name], weights(), layers, peers), STEPS))
    for rank_result in found:
        expect_close(rank_result, whole(name))
    expect_same_bits(found)


STEPS_BY_RANK: list[list[Step | None]] = [  # None: only the other rank has tokens
    [Step((0, 0), (5, 3)), Step((5, 3), (1, 1)), None, Step((6,), (2,))],
    [Step((0,), (13,)), None, Step((13,), (1,)), Step((14, 0, 0), (1, 4, 2))],
]


@pytest.mark.parametrize(("name", "stages"), matrix([*DSA, "qwen3"], [1, 2], together=1))
def test_data_parallel_ranks_match_a_single_rank(name: str, stages: int) -> None:
    """The two ranks compute different numbers of tokens in each step, sometimes none."""
    spec = SPECS[name]
    layers = stage_layers(spec, stages)
    tokens = [[0 if step is None else step.tokens for step in steps] for steps in zip(*STEPS_BY_RANK, strict=True)]
    found = on_ranks(
        2,
        lambda peers: run_steps(
            build_stages(spec, weights(), layers, peers, data_parallel=True), STEPS_BY_RANK[peers.rank], tokens
        ),
    )
    for rank_result, steps in zip(found, STEPS_BY_RANK, strict=True):
        single_rank = run_steps(build_stages(spec, weights(), layers), [step for step in steps if step is not None])
        expect_close(rank_result, single_rank)


@pytest.mark.parametrize("data_parallel", [False, True])
def test_padding_is_routed_to_no_expert_of_any_rank(data_parallel: bool) -> None:
    """Tensor parallel ranks have the same padding. Of the data parallel ranks, only one has padding."""
    spec = SPECS["deepseek_v32"]
    seats = torch.tensor([0, EMPTY, EMPTY, 0])
    padded, plain = Step((0,), (4,), padded=seats), Step((0,), (4,))
    expected = [run_steps(build_stages(spec, weights()), [step]) for step in (padded, plain)]
    assert not torch.allclose(expected[0].logits[0], expected[1].logits[0])
    steps = [[padded], [plain if data_parallel else padded]]
    found = on_ranks(
        2,
        lambda peers: run_steps(build_stages(spec, weights(), None, peers, data_parallel), steps[peers.rank], [[4, 4]]),
    )
    expect_close(found[0], expected[0])
    expect_close(found[1], expected[1 if data_parallel else 0])
