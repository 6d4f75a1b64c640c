"""The splits of a model that are accepted or refused, and the alternatives in the error messages."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from harness import RandomWeights
from split_workers import SPECS, RecordingWeights

from hotset.base.errors import ConfigError
from hotset.models.allowed_splits import check_data_parallel, check_tensor_parallel, stage_layers
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.attention.gqa_spec import GqaSpec
from hotset.models.collectives import planning_collectives
from hotset.models.decoder import Decoder
from hotset.models.model_tensors import layer_tensors, matrix_values
from hotset.models.spec import ModelSpec
from hotset.models.split import Split

LLAMA, GLM, DEEPSEEK = SPECS["llama"], SPECS["glm_moe_dsa"], SPECS["deepseek_v32"]


def refusal(check: Callable[[ModelSpec, int], None], spec: ModelSpec, size: int) -> str:
    with pytest.raises(ConfigError) as refused:
        check(spec, size)
    return str(refused.value)


def test_sizes_that_divide_all_counts_are_accepted() -> None:
    for name, spec in SPECS.items():
        for ranks in (1, 2, 4):
            check_tensor_parallel(spec, ranks)
            check_data_parallel(spec, ranks)
        assert Split().tp_shard(7) == range(7), name


def test_indivisible_heads_and_columns_are_reported_with_the_nearest_sizes_that_work() -> None:
    message = refusal(check_tensor_parallel, LLAMA, 3)  # 8 heads, 4 KV heads, 32 columns
    assert message == (
        "--tensor-parallel-size 3 does not divide 8 attention heads and 32 columns of a dense MLP and 4 KV heads "
        "evenly; nearest that works: 2 or 4"
    )
    assert refusal(check_tensor_parallel, LLAMA, 16).endswith("8 attention heads evenly; nearest that works: 8")


def test_every_kv_head_is_replicated_equally_often() -> None:
    spec = replace(LLAMA, mlp_width=48, attention=GqaSpec(12, 4, 8))
    assert "4 KV heads evenly; nearest that works: 4 or 12" in refusal(check_tensor_parallel, spec, 6)
    check_tensor_parallel(spec, 12)


def test_indivisible_experts_and_shared_experts_are_reported() -> None:
    assert DEEPSEEK.moe is not None
    odd = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, width=5))
    assert "5 columns of the shared experts evenly; nearest that works: 1" in refusal(check_tensor_parallel, odd, 2)
    check_data_parallel(odd, 8)  # data parallel ranks do not divide shared experts
    assert refusal(check_data_parallel, odd, 3) == (
        "--data-parallel-size 3 does not divide 8 experts evenly; nearest that works: 2 or 4"
    )
    check_data_parallel(LLAMA, 3)  # a model without experts


def test_the_width_of_dense_mlps_is_ignored_if_no_layer_is_dense() -> None:
    assert DEEPSEEK.moe is not None
    routed = replace(DEEPSEEK, mlp_width=33, moe=replace(DEEPSEEK.moe, layers=(0, 1, 2, 3)))
    check_tensor_parallel(routed, 4)
    assert "33 columns of a dense MLP" in refusal(check_tensor_parallel, replace(DEEPSEEK, mlp_width=33), 4)


def test_a_decoder_refuses_a_split_that_is_not_even() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3"):
        Decoder(LLAMA, RandomWeights(torch.float64, 1), split=Split(0, 3), collectives=planning_collectives(0, 3))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 60, 80])
def test_every_token_of_the_vocabulary_is_on_one_rank(ranks: int) -> None:
    shards = [Split(rank, ranks).vocabulary(61) for rank in range(ranks)]
    assert [token for shard in shards for token in shard] == list(range(61))
    assert {Split(rank, ranks).vocabulary_shard_size(61) for rank in range(ranks)} == {-(-61 // ranks)}


@pytest.mark.parametrize("name", SPECS)
def test_layer_weights_are_the_numbers_of_weights_that_a_decoder_loads(name: str) -> None:
    recording = RecordingWeights()
    Decoder(SPECS[name], recording)
    matrices = {name: tensor.numel() for name, tensor in recording.tensors.items() if tensor.dim() == 2}
    for layer, weights in enumerate(layer_weights(SPECS[name])):
        assert weights == sum(count for name, count in matrices.items() if name.startswith(f"model.layers.{layer}."))


def layer_weights(spec: ModelSpec) -> list[int]:
    return [matrix_values(layer_tensors(spec, layer)) for layer in range(spec.layers)]


def division_cost(spec: ModelSpec, stages: list[range]) -> tuple[int, int]:
    """Returns the number of weights in the heaviest stage, and the sum of the squares over all stages."""
    weights, vocabulary = layer_weights(spec), spec.vocab * spec.hidden
    sums = [sum(weights[layer] for layer in stage) for stage in stages]
    sums[0] += vocabulary
    sums[-1] += vocabulary
    return max(sums), sum(weight**2 for weight in sums)


@pytest.mark.parametrize(
    ("layers", "full", "moe", "vocab", "stages"),
    [
        *((12, (0, 1, 2, 5, 7, 8, 10), range(3, 12), vocab, n) for vocab in (8, 61, 4000) for n in (1, 2, 3, 4, 6)),
        (8, tuple(range(8)), (1, 2, 6), 200, 4),  # the best division of the first layers is no part of the best one
    ],
)
def test_no_other_division_has_a_lighter_heaviest_stage_or_a_smaller_sum_of_squares(
    layers: int, full: tuple[int, ...], moe: Iterable[int], vocab: int, stages: int
) -> None:
    assert isinstance(GLM.attention, MlaSpec) and GLM.moe is not None
    attention = replace(GLM.attention, index=replace(GLM.attention.index, full_layers=full))
    spec = replace(GLM, vocab=vocab, layers=layers, attention=attention, moe=replace(GLM.moe, layers=tuple(moe)))
    found = stage_layers(spec, stages)
    assert [layer for stage in found for layer in stage] == list(range(layers)) and all(found)
    assert all(stage.start in full for stage in found)
    all_bounds = ([0, *inner, layers] for inner in combinations(full[1:], stages - 1))
    divisions = [[range(first, last) for first, last in pairwise(bounds)] for bounds in all_bounds]
    assert division_cost(spec, found) == min(division_cost(spec, division) for division in divisions)


def test_equal_layers_are_divided_evenly() -> None:
    spec = replace(LLAMA, layers=30, vocab=1)
    assert [len(stage) for stage in stage_layers(spec, 5)] == [6] * 5
    assert sorted(len(stage) for stage in stage_layers(spec, 4)) == [7, 7, 8, 8]


def stages_refused(spec: ModelSpec, stages: int, layer_counts: tuple[int, ...] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        stage_layers(spec, stages, layer_counts)
    return str(refused.value)


def test_explicit_stage_layers_are_used_as_given() -> None:
    assert stage_layers(LLAMA, 2, (1, 3)) == [range(1), range(1, 4)]
    assert stage_layers(GLM, 3, (1, 2, 2)) == [range(1), range(1, 3), range(3, 5)]


def test_explicit_stage_layers_that_do_not_add_up_are_refused_with_both_numbers() -> None:
    assert "--pipeline-layers 2,3 has 5 layers and the model has 4" in stages_refused(LLAMA, 2, (2, 3))
    assert "at least one" in stages_refused(LLAMA, 2, (4, 0))
    assert "has 3 stages, but --pipeline-parallel-size is 2" in stages_refused(LLAMA, 2, (1, 1, 2))


def test_a_stage_bound_within_an_index_group_is_refused_with_the_nearest_division_that_works() -> None:
    message = stages_refused(GLM, 2, (4, 1))
    assert message == ("--pipeline-layers 4,1 would separate layers that share an indexer; nearest that works: 3,2")
    assert stages_refused(GLM, 3, (2, 2, 1)).endswith("nearest that works: 1,2,2")


def test_more_stages_than_layers_or_index_groups_are_refused() -> None:
    assert stages_refused(LLAMA, 5).endswith("the model has 4 layers; from 1 to 4 stages work")
    message = stages_refused(GLM, 4)
    assert "5 layers in 3 groups that share an indexer; from 1 to 3 stages work" in message
