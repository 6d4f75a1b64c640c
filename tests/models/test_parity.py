"""Logits and tokens agree with those of transformers, an independent implementation.

For each family, hypothesis draws tiny configurations. transformers creates the model and writes it with
`save_pretrained`. Hotset loads that directory and answers prompts in mixed batches with random chunk and page sizes.
transformers, the oracle, then scores prompt and answer in one pass without a cache. Logits, and the log-probabilities
reported for the prompt, must agree within TOLERANCE, and tokens must be the same. After a near tie, the logits and
tokens of a request may differ. At most a share MAX_DIFFERING of the requests may do so.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # imports its classes lazily
from harness import CPU, Answer, Recorder, make_engine, run_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotset.base.sampling import SamplingParams
from hotset.engine.outputs import PromptLogprobs
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import open_weights
from hotset.models.decoder import Decoder

SIZES = [(3, 12), pytest.param(150, 64, marks=pytest.mark.slow)]  # number of examples, tokens per answer
TOLERANCE = 1e-4  # the largest difference between logits, and between log-probabilities
NEAR_TIE = 1e-5  # rounding can reverse the order of two scores or logits if their gap is smaller than this
MAX_DIFFERING = 0.1  # the largest share of requests that may differ from the oracle after a near tie


class StableTopk:
    """Replaces `torch.topk`: the earlier of tied positions wins, as in Hotset. Records the gap at the k-th value."""

    def __init__(self) -> None:
        self.gaps: list[torch.Tensor] = []  # per call, for each query: the k-th largest value minus the next

    def __call__(self, x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        assert largest and dim in (-1, x.dim() - 1)
        values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
        if k < x.shape[-1]:
            gap = values[..., k - 1] - values[..., k]
            self.gaps.append(torch.where(torch.isfinite(values[..., k]), gap, float("inf")).flatten())
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    @contextlib.contextmanager
    def installed(self) -> Iterator["StableTopk"]:
        function, method = torch.topk, torch.Tensor.topk
        torch.topk = self.__call__  # type: ignore[assignment]
        torch.Tensor.topk = lambda tensor, *a, **kw: self(tensor, *a, **kw)  # type: ignore[method-assign]
        try:
            yield self
        finally:
            torch.topk, torch.Tensor.topk = function, method  # type: ignore[method-assign]

    def smallest_gaps(self, positions: int) -> torch.Tensor:
        """Returns, for each position, the smallest gap at that position or an earlier one.

        The result at a position depends on the selections at earlier positions. Calls with more than one query per
        position, such as the best experts of each group, do not count.
        """
        smallest = torch.full((positions,), float("inf"))
        for gap in self.gaps:
            if gap.shape[0] == positions:
                smallest = torch.minimum(smallest, gap)
        return torch.cummin(smallest, 0).values


@st.composite
def ropes(draw: st.DrawFn, kinds: list[str]) -> dict[str, Any]:
    kind = draw(st.sampled_from(kinds))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([100.0, 10000.0, 500000.0]))}
    if kind != "default":
        rope["factor"] = draw(st.sampled_from([2.0, 8.0]))
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = draw(st.sampled_from([32, 64]))
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        rope |= draw(
            st.sampled_from([{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.2}])
        )
        rope |= draw(
            st.sampled_from([{}, {"beta_fast": 16, "beta_slow": 2}, {"truncate": False}, {"attention_factor": 1.3}])
        )
    return rope


@st.composite
def common_fields(draw: st.DrawFn, rope_kinds: list[str]) -> dict[str, Any]:
    return {
        "vocab_size": draw(st.integers(40, 200)),
        "attention_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "max_position_embeddings": 256,
        "rope_parameters": draw(ropes(rope_kinds)),
        "eos_token_id": None,
        "bos_token_id": None,
    }


@st.composite
def gqa_fields(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([8, 16]))
    return draw(common_fields(["default", "linear", "llama3", "yarn"])) | {
        "hidden_size": draw(st.sampled_from([24, 48])),
        "intermediate_size": draw(st.sampled_from([24, 64])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2, 4])),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


@st.composite
def dsa_fields(draw: st.DrawFn) -> dict[str, Any]:
    layers = draw(st.integers(1, 4))
    groups = draw(st.sampled_from([1, 2, 4]))
    experts = groups * draw(st.sampled_from([2, 3]))
    topk_group = draw(st.integers(1, groups))
    rope_dim = draw(st.sampled_from([4, 8]))
    heads = draw(st.sampled_from([1, 2, 4]))
    return draw(common_fields(["default", "yarn"])) | {
        "hidden_size": draw(st.sampled_from([32, 48])),
        "intermediate_size": draw(st.sampled_from([24, 48])),
        "moe_intermediate_size": draw(st.sampled_from([16, 24])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": draw(st.integers(1, 2)),
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": topk_group,
        "num_experts_per_tok": draw(st.integers(1, topk_group * experts // groups)),
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "kv_lora_rank": draw(st.sampled_from([16, 24])),
        "q_lora_rank": draw(st.sampled_from([16, 24])),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": draw(st.sampled_from([8, 12])),
        "v_head_dim": draw(st.sampled_from([8, 12])),
        "index_topk": draw(st.sampled_from([4, 7, 16])),
        "index_head_dim": rope_dim + draw(st.sampled_from([4, 8])),
        "index_n_heads": draw(st.sampled_from([1, 2, 4])),
    }


@st.composite
def glm_fields(draw: st.DrawFn) -> dict[str, Any]:
    fields = draw(dsa_fields())
    kinds = [draw(st.sampled_from(["full", "shared"])) for _ in range(fields["num_hidden_layers"] - 1)]
    return fields | {"indexer_types": ["full", *kinds]}


FAMILIES = {  # the prefix of the class names in transformers, and the fields of the configuration
    "llama": ("Llama", gqa_fields()),
    "qwen3": ("Qwen3", gqa_fields()),
    "deepseek_v32": ("DeepseekV32", dsa_fields()),
    "glm_moe_dsa": ("GlmMoeDsa", glm_fields()),
}


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the lengths of prompts. Also draws arrival times and engine settings, which must not change answers."""
    return {
        "lengths": draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        "arrive_at": draw(st.lists(st.integers(0, 20), min_size=4, max_size=4)),
        "settings": {
            "max_num_seqs": draw(st.integers(1, 4)),
            "max_num_batched_tokens": draw(st.sampled_from([3, 8, 17, 256])),
            "page_rows": draw(st.sampled_from([1, 4, 5, 16])),
            "plans_in_flight": draw(st.integers(1, 3)),
            "device_kv_tokens": draw(st.sampled_from([128, 160, 1024])),
            "max_model_len": 120,
        },
    }


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Sets weights to random values, so large that attention, routing and selection matter. Keeps rope frequencies."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                tensor.copy_(1 + 0.1 * noise)
            elif tensor.dim() >= 2:
                tensor.copy_(1.5 * noise * tensor.shape[-1] ** -0.5)
            else:
                tensor.copy_(0.1 * noise)


def our_answers(
    directory: Path, prompts: list[list[int]], tokens: int, workload: dict[str, Any]
) -> tuple[list[Answer], Recorder]:
    files = find_model(str(directory))
    weights = open_weights(files, torch.float32, CPU)
    recorder = Recorder(Decoder(files.spec, weights))
    weights.finish()
    engine = make_engine(recorder, files.spec, **workload["settings"])
    params = [SamplingParams(temperature=0, max_tokens=tokens, prompt_logprobs=3)] * len(prompts)
    return run_all(engine, prompts, params, workload["arrive_at"][: len(prompts)]), recorder


def worst_difference(
    recorder: Recorder, sequence: list[int], prompt_logprobs: PromptLogprobs, oracle: torch.Tensor
) -> torch.Tensor:
    """Returns, for each position, the largest difference from the oracle's logits, or from its log-probabilities where
    the next token belongs to the prompt.

    A preempted request computes some positions more than once. The worst result of a position counts.
    """
    worst = torch.zeros(len(sequence))
    for position in range(len(sequence)):
        ours = torch.stack(recorder.recorded[tuple(sequence[: position + 1])])
        worst[position] = (ours - oracle[position]).abs().max()
    logprobs = oracle.log_softmax(-1)
    for position, entry in enumerate(prompt_logprobs[1:]):
        assert entry is not None and len(entry) >= 3
        differences = [abs(value.logprob - float(logprobs[position, token])) for token, value in entry.items()]
        worst[position] = max(*differences, float(worst[position]))
    return worst


@pytest.mark.parametrize(("examples", "tokens"), SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens_match_transformers_except_after_near_ties(
    family: str, examples: int, tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix, fields = FAMILIES[family]
    config_type, model_type = (getattr(transformers, f"{prefix}{kind}") for kind in ("Config", "ForCausalLM"))
    requests, differing = 0, 0

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(fields, workloads(), st.integers(0, 2**31))
    def check(fields: dict[str, Any], workload: dict[str, Any], seed: int) -> None:
        nonlocal requests, differing
        directory = tmp_path_factory.mktemp(family)
        torch.manual_seed(seed)
        oracle = model_type(config_type(**fields, attn_implementation="eager")).eval()
        randomise(oracle, seed)
        oracle.save_pretrained(directory, max_shard_size="100KB")
        generator = torch.Generator().manual_seed(seed)
        prompts = [
            torch.randint(fields["vocab_size"], (length,), generator=generator).tolist()
            for length in workload["lengths"]
        ]
        answers, recorder = our_answers(directory, prompts, tokens, workload)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.token_ids) == tokens
            requests += 1
            differing += differs_after_near_tie(oracle, prompt, answer, recorder)

    check()
    summary = f"{family}: {differing} of {requests} requests differ from the oracle after near ties"
    print(summary)
    assert requests >= examples
    assert differing <= MAX_DIFFERING * requests, summary


def differs_after_near_tie(oracle: torch.nn.Module, prompt: list[int], answer: Answer, recorder: Recorder) -> bool:
    """Returns whether a request differs from the oracle at or after a near tie. Any other difference fails the test."""
    sequence = prompt + answer.token_ids[:-1]
    topk = StableTopk()
    with torch.no_grad(), topk.installed():
        logits = oracle(torch.tensor([sequence]), use_cache=False).logits[0]
    selection_gaps = topk.smallest_gaps(len(sequence))
    best = torch.sort(logits, dim=-1, descending=True).values
    difference = worst_difference(recorder, sequence, PromptLogprobs(prompt, answer.prompt_logprobs), logits)
    tokens = torch.argmax(logits[len(prompt) - 1 :], dim=-1).tolist()
    for position in range(len(sequence)):
        index = position - len(prompt) + 1  # index in the answer of the token that this position predicts
        token_differs = index >= 0 and tokens[index] != answer.token_ids[index]
        if not token_differs and difference[position] <= TOLERANCE:
            continue
        gap = min(
            selection_gaps[position].item(),
            (best[position, 0] - best[position, 1]).item() if token_differs else float("inf"),
        )
        assert gap < NEAR_TIE, (
            f"position {position}: logits differ by {difference[position]:.2e}, token differs: {token_differs}, "
            f"smallest gap {gap:.2e}"
        )
        return True
    return False
