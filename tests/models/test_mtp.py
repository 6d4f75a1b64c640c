"""The MTP layer against an independent model of it, over poisoned pages; its weights, its sizes and its splits."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from harness import CPU, RandomWeights
from models.mtp_oracle import Iteration, MtpOracle
from models.split_workers import CONTEXT, PAGE_ROWS, SPECS, Memory, RecordingWeights, on_ranks
from safetensors.torch import save_file
from torch import Tensor

from hotset.memory.resident import ResidentView, make_batch
from hotset.models.allowed_splits import stage_layers
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import open_weights
from hotset.models.collectives import planning_collectives
from hotset.models.decoder import Decoder, worker_kv_shape
from hotset.models.model_tensors import worker_weight_bytes
from hotset.models.spec import AS_COMPUTED, MtpSpec
from hotset.models.split import WHOLE_MODEL, Split
from hotset.models.weight_plan import plan_weights, weight_bytes

# DeepSeek-V3.2, GLM-5, and GLM-5.2, whose later iterations reuse the first one's selection.
MODELS = {
    "deepseek_v32": replace(SPECS["deepseek_v32"], mtp=MtpSpec(carries_normed=False, shares_selection=False)),
    "glm_moe_dsa": replace(SPECS["glm_moe_dsa"], mtp=MtpSpec(carries_normed=True, shares_selection=False)),
    "glm_moe_dsa, shared": replace(SPECS["glm_moe_dsa"], mtp=MtpSpec(carries_normed=True, shares_selection=True)),
}
DRAFTS = 3


class DraftingMemory:
    """A decoder with an MTP layer, and the pages of its requests. Seats are the requests, in order."""

    def __init__(self, decoder: Decoder, context: int = CONTEXT) -> None:
        self.decoder, self.memory = decoder, Memory(decoder.kv_shape, context)

    def view(self, seats: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> ResidentView:
        return ResidentView(self.memory.pool, self.memory.tables, make_batch(seats, starts, counts, CPU))

    def step(self, texts: Sequence[Sequence[int]], starts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Computes the tokens [starts[i], starts[i] + counts[i]) of `texts[i]` with the trunk and with the first
        iteration. Returns the hidden states from which the layer started."""
        view = self.view(range(len(texts)), starts, counts)
        spans = list(zip(texts, starts, counts, strict=True))
        ids = torch.tensor([token for text, start, count in spans for token in text[start : start + count]])
        following = torch.tensor(
            [token for text, start, count in spans for token in text[start + 1 : start + count + 1]]
        )
        hidden = self.decoder.mtp_input(self.decoder.forward(ids, view))
        self.output = self.decoder.run_mtp(following, hidden, view)
        return hidden

    def drafts(self, lengths: Sequence[int], last_of: Tensor, chained: Sequence[Sequence[int]]) -> list[Tensor]:
        """Drafts after the tokens `last_of` of the step. `chained[i]` are the tokens that iteration i + 2 gets, by
        request. Returns the logits of every iteration."""
        output, seats = self.output, range(len(lengths))
        logits = [self.decoder.mtp_logits(output.normed[last_of])]
        hidden, selected = output.carried[last_of], output.selected[last_of]
        for number, tokens in enumerate(chained):
            view = self.view(seats, [length + number for length in lengths], [1] * len(lengths))
            output = self.decoder.run_mtp(torch.tensor(tokens), hidden, view, selected)
            hidden = output.carried
            logits.append(self.decoder.mtp_logits(output.normed))
        return logits


def oracle_drafts(
    oracle: MtpOracle, text: Sequence[int], hidden: Tensor, chained: Sequence[int], shares: bool
) -> list[Tensor]:
    """Returns the logits of the iterations that follow the slots of `text`, one token of `chained` after another."""
    known = len(hidden)
    tokens, chosen = list(text[1 : known + 1]), None
    last: Iteration = oracle(tokens, hidden, known)
    logits = [last.logits[-1]]
    if shares:
        chosen = last.chosen[-1]
    for token in chained:
        tokens.append(token)
        hidden = torch.cat((hidden, last.carried[-1:]))
        last = oracle(tokens, hidden, known, chosen)
        logits.append(last.logits[-1])
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_those_of_the_published_layer(name: str) -> None:
    """Three requests in mixed batches: two prompts in chunks, then steps that compute drafted positions again."""
    spec = MODELS[name]
    assert spec.mtp is not None
    weights = RandomWeights(torch.float64, seed=11)
    drafting = DraftingMemory(Decoder(spec, weights))
    oracle = MtpOracle(spec, cache(weights.load))
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(spec.vocab, (3, 34), generator=generator).tolist()
    steps = [((0, 0, 0), (9, 3, 12)), ((9, 3, 12), (9, 1, 2)), ((18, 4, 14), (2, 3, 1))]
    hidden: list[list[Tensor]] = [[], [], []]
    with torch.inference_mode():
        for starts, counts in steps:
            parts = drafting.step(texts, starts, counts).split(counts)
            for request, part in enumerate(parts):
                hidden[request].append(part)
            lengths = [start + count for start, count in zip(starts, counts, strict=True)]
            ends = torch.tensor(counts).cumsum(0) - 1
            chained = torch.randint(spec.vocab, (DRAFTS - 1, 3), generator=generator).tolist()
            drafted = drafting.drafts(lengths, ends, chained)
            for request in range(3):
                expected = oracle_drafts(
                    oracle,
                    texts[request],
                    torch.cat(hidden[request]),
                    [tokens[request] for tokens in chained],
                    spec.mtp.shares_selection,
                )
                for iteration in range(DRAFTS):
                    torch.testing.assert_close(drafted[iteration][request], expected[iteration], rtol=1e-9, atol=1e-9)
    assert lengths[0] > 2 * PAGE_ROWS > spec.attention.index.topk  # type: ignore[union-attr]


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_ranks_draft_the_same(name: str) -> None:
    spec = MODELS[name]
    weights, texts = RandomWeights(torch.float64, seed=3), [[5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43]]

    def draft(decoder: Decoder) -> list[Tensor]:
        drafting = DraftingMemory(decoder)
        drafting.step(texts, [0], [10])
        return drafting.drafts([10], torch.tensor([9]), [[8], [9]])

    with torch.inference_mode():
        whole = draft(Decoder(spec, weights))
    by_rank = on_ranks(
        2, lambda ranks: draft(Decoder(spec, weights, AS_COMPUTED, Split(tp_rank=ranks.rank, tp_size=2), ranks))
    )
    for ranked in by_rank:
        for one, other in zip(whole, ranked, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_is_one_more_layer_with_its_own_index_group_of_the_last_stage(name: str) -> None:
    spec = MODELS[name]
    plain = worker_kv_shape(replace(spec, mtp=None), torch.float64, AS_COMPUTED)
    shape = worker_kv_shape(spec, torch.float64, AS_COMPUTED)
    assert (shape.layers, shape.key_layers) == (plain.layers + 1, (*plain.key_layers, plain.layers))
    first, last = (Split(layers=layers) for layers in stage_layers(spec, 2))
    stages = [worker_kv_shape(spec, torch.float64, AS_COMPUTED, split) for split in (first, last)]
    assert sum(stage.layers for stage in stages) == shape.layers
    assert stages[1].key_layers[-1] == stages[1].layers - 1


@pytest.mark.parametrize("name", MODELS)
def test_sizes_and_plans_count_the_layer(name: str) -> None:
    spec, weights = MODELS[name], RandomWeights(torch.bfloat16, seed=1)
    for split in (
        WHOLE_MODEL,
        Split(tp_rank=1, tp_size=2),
        *(Split(layers=layers) for layers in stage_layers(spec, 2)),
    ):
        decoder = Decoder(spec, weights, split=split, collectives=planning_collectives(split.rank, split.size))
        plan = plan_weights(spec, weights, AS_COMPUTED, split)
        assert plan.device_bytes == weight_bytes(decoder)
        assert plan.device_bytes == pytest.approx(worker_weight_bytes(spec, split, 2), rel=0.002)
        assert plan.kv_shape == decoder.kv_shape
    without = plan_weights(replace(spec, mtp=None), weights, AS_COMPUTED, WHOLE_MODEL)
    assert without.device_bytes < worker_weight_bytes(spec, WHOLE_MODEL, 2)


def test_a_checkpoint_with_the_layer_loads_with_or_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Published checkpoints repeat embedding and LM head in the MTP layer. Only what is used is read."""
    spec = MODELS["deepseek_v32"]
    assert isinstance(spec.attention, MlaSpec) and spec.moe is not None
    config = {
        "model_type": "deepseek_v32",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "intermediate_size": spec.mlp_width,
        "num_attention_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 8,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "mlp_layer_types": ["sparse" if layer in spec.moe.layers else "dense" for layer in range(spec.layers)],
        "max_position_embeddings": 96,
        "dtype": "float32",
        "num_nextn_predict_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = RecordingWeights()
    Decoder(spec, named)
    tensors = {name: tensor.contiguous() for name, tensor in named.tensors.items()}
    copies = {
        f"model.layers.{spec.layers}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"model.layers.{spec.layers}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    save_file(tensors | copies, tmp_path / "model.safetensors")
    with_layer, without = (find_model(str(tmp_path), with_mtp=loads) for loads in (True, False))
    assert with_layer.spec.mtp == spec.mtp and without.spec.mtp is None
    assert without.fingerprint() != with_layer.fingerprint()
    with caplog.at_level(logging.INFO):
        for files in (with_layer, without):
            weights = open_weights(files, torch.float32, CPU)
            decoder = Decoder(files.spec, weights)
            weights.finish()
            assert decoder.kv_shape.layers == spec.layers + (files is with_layer)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        f"skipped layer {spec.layers} (multi-token prediction, beyond num_hidden_layers)"
    ]
