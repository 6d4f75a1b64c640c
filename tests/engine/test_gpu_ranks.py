"""Several ranks on one GPU, with CUDA graphs, compute what one process computes.

The tests marked `gpu` need the multi-process service: `scripts/gpu ranks` starts it, runs them and ends it.
"""

import gc
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.symmetric_ranks import COLLECTIVES, has_mps
from harness import DEMO, tiny_directory
from torch import Tensor

from hotset import LLM, SamplingParams
from hotset.engine.drafts.costs import StepCosts
from hotset.engine.loading import ModelLoader
from hotset.engine.outputs import EngineStats
from hotset.engine.progress import Progress
from hotset.engine.workers import launcher as launcher_module
from hotset.engine.workers import worker as worker_module
from hotset.engine.workers.processes import MultiprocessExecutor
from hotset.lab.evaluate.tasks import Question, make_questions
from hotset.models.checkpoint.files import find_model
from hotset.models.decoder import Decoder
from hotset.models.tokenizer import Tokenizer

SPLITS: dict[str, dict[str, int]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "TP 4": {"tensor_parallel_size": 4},
    "PP 2": {"pipeline_parallel_size": 2},
    "TP 2 x PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "DP 2": {"data_parallel_size": 2},
    "DP 4": {"data_parallel_size": 4},
}
TIERS = ("off", "auto", "always")
SEATS = 8
SMALL: dict[str, Any] = {
    "max_num_seqs": SEATS,
    "max_num_batched_tokens": 512,
    "max_model_len": 1536,
    "speculate": 0,
}
# This pool is so small that requests with long prompts are demoted and promoted, and those with long answers parked.
POOL: dict[str, Any] = {"device_kv_tokens": 2560}
HOST: dict[str, Any] = {"host_kv_tokens": 16384}
LONG_ANSWERS = (24, 40, 56, 72, 88, 104)
SHORT_QUESTIONS, SHORT_ANSWER = 8, 160
DSA = json.loads((Path(DEMO) / "config.json").read_text()) | {"num_hidden_layers": 4}
GQA = {
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
RANDOM_MODELS = {"dsa": DSA, "gqa": GQA}
FORCING_BIAS = 100.0  # larger than any difference between logits
# Largest mean difference of log-probabilities, as a share of their standard deviation over all tokens. Unrelated
# log-probabilities would differ by more than 1.
MAX_DIFFERENCE = 0.1
FP8_LAYERS, FP8_EXPERTS = 30, 64  # half of the layers, and the experts that two of eight ranks hold
FEW_FP8_LAYERS = 2  # one dense and one with experts: so few that rounding hardly changes logits


def on_one_gpu(split: dict[str, int]) -> dict[str, Any]:
    """Returns the settings of an engine whose workers share the first GPU."""
    workers = 1
    for size in split.values():
        workers *= size
    return {"device": "cuda", "gpus": "0", "ranks_per_gpu": workers, "collectives": COLLECTIVES, **split}


def on_gpu(test: Any) -> Any:
    """Marks a test that needs a GPU and the multi-process service."""
    return pytest.mark.gpu(pytest.mark.skipif(not has_mps(), reason="needs nvidia-cuda-mps-control -d")(test))


@dataclass(frozen=True)
class Answered:
    answers: list[tuple[int, list[int]]]  # number of the question, tokens of its answer
    stats: EngineStats


@lru_cache
def questions() -> tuple[list[Question], list[list[int]], list[int]]:
    """Returns questions for the demo model, their prompts, and the number of tokens to generate for each.

    The long ones come first.
    """
    tokenizer = Tokenizer.load(find_model(DEMO), None)
    assert tokenizer is not None
    encode = tokenizer.encode
    tasks = ["lookup", "several", "chain"]
    asked = [
        *make_questions(tasks, 1024, len(LONG_ANSWERS), 3, lambda text: 1 + len(encode(text))),
        *make_questions(["lookup"], 256, SHORT_QUESTIONS, 4, lambda text: 1 + len(encode(text))),
    ]
    prompts = [encode("<|bos|>" + question.prompt) for question in asked]
    return asked, prompts, [len(encode(question.answer)) for question in asked]


def answer_questions(**settings: Any) -> Answered:
    """Answers the long questions together, then the short ones, then the long ones again, from the prefix cache if
    there is one. With several replicas, all questions are asked once for each."""
    _, prompts, counts = questions()
    replicas = settings.get("data_parallel_size", 1)
    long, short = range(len(LONG_ANSWERS)), range(len(LONG_ANSWERS), len(prompts))
    answers: list[tuple[int, list[int]]] = []
    with LLM(DEMO, progress=False, **(SMALL | settings)) as llm:
        check_graphs(llm, settings)
        for part, limits in ((long, LONG_ANSWERS), (short, [SHORT_ANSWER] * len(short)), (long, counts[: len(long)])):
            params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in limits]
            outputs = llm.generate(copies([prompts[number] for number in part], replicas), params * replicas)
            tokens = [output.outputs[0].token_ids for output in outputs]
            answers += zip([*part] * replicas, tokens, strict=True)
            llm.audit()
        return Answered(answers, llm.stats())


def copies(prompts: Sequence[Sequence[int]], replicas: int) -> list[dict[str, Any]]:
    """Returns every prompt once for each replica. Copies share no prefix, so that all replicas compute."""
    return [
        {"prompt_token_ids": list(prompt), "cache_salt": str(replica)}
        for replica in range(replicas)
        for prompt in prompts
    ]


def check_graphs(llm: LLM, settings: dict[str, Any]) -> None:
    """Asserts that workers on a GPU have captured their decode steps."""
    executor = llm._engine.executor
    if isinstance(executor, MultiprocessExecutor) and settings["device"] == "cuda":
        assert executor._has_graphs, "the workers have captured no graphs"


@lru_cache
def retrieved_by_one_process(device: str) -> list[list[int]]:
    """Returns the answer of one process to each question, cut to the length of the correct answer."""
    _, _, counts = questions()
    found = answer_questions(device=device, tiers="off", device_kv_tokens=16384).answers[: len(counts)]
    return [tokens[:count] for (_, tokens), count in zip(found, counts, strict=True)]


def record_checksums(folder: str, pipe: Connection, progress: Progress) -> None:
    """Runs a worker process that adds up the residual stream after every layer, also in replayed graphs. When it ends,
    it writes the checksum of each layer to a file in `folder`."""
    load, recorded = ModelLoader.load, []

    def load_and_record(loader: ModelLoader, *arguments: Any) -> Decoder:
        decoder = load(loader, *arguments)
        checksums = torch.zeros(decoder.spec.layers, dtype=torch.int64, device=decoder.device)

        def add(layer: int, x: Tensor) -> None:
            bits = x.view(torch.int16 if x.element_size() == 2 else torch.int32)
            checksums[layer].mul_(31).add_(bits.sum(dtype=torch.int64))  # depends on the order of the steps

        decoder.on_residual = add
        recorded.append((loader._split, checksums))
        return decoder

    ModelLoader.load = load_and_record  # type: ignore[method-assign]
    worker_module.main(pipe, progress)
    for split, checksums in recorded:
        path = Path(folder) / f"layer-{split.first_layer}-rank-{split.tp_rank}.json"
        path.write_text(json.dumps(checksums.tolist()))


def check_checksums(folder: Path, split: dict[str, int]) -> None:
    """Asserts that the tensor parallel ranks of each stage have had the same residual streams."""
    ranks, stages = split.get("tensor_parallel_size", 1), split.get("pipeline_parallel_size", 1)
    of_stage: dict[str, list[list[int]]] = {}
    for path in sorted(folder.glob("layer-*.json")):
        of_stage.setdefault(path.name.split("-rank-")[0], []).append(json.loads(path.read_text()))
    assert len(of_stage) == stages and all(len(of_ranks) == ranks for of_ranks in of_stage.values())
    for name, of_ranks in of_stage.items():
        assert any(of_ranks[0]) and all(found == of_ranks[0] for found in of_ranks), f"the ranks differ: {name}"


@pytest.fixture
def checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes workers record checksums of their residual streams in the returned folder."""
    folder = tmp_path / "checksums"
    folder.mkdir()
    monkeypatch.setattr(launcher_module, "main", partial(record_checksums, str(folder)))
    return folder


def memory_of(tiers: str) -> dict[str, Any]:
    return {"tiers": tiers, **POOL, **({} if tiers == "off" else HOST)}


@on_gpu
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_on_one_gpu_give_the_retrieval_answers_of_one_process(split: str, tiers: str, checksums: Path) -> None:
    asked, _, counts = questions()
    expected = retrieved_by_one_process("cuda")
    answered = answer_questions(**on_one_gpu(SPLITS[split]), **memory_of(tiers))
    for question, tokens in answered.answers:
        assert tokens[: counts[question]] == expected[question], f"question {question}: {asked[question].task}"
    stats = answered.stats
    happened = {
        "off": {"recomputes": stats.recomputes},
        "auto": {"demotions": stats.demotions, "promotions": stats.promotions, "parks": stats.parks},
        "always": {"bytes swapped": stats.bytes_swapped},
    }
    if tiers != "off":
        happened[tiers]["tokens from the prefix cache"] = stats.tokens_reused
    assert all(happened[tiers].values()), f"the pools were too large, so this test checks too little: {happened[tiers]}"
    assert stats.device_pages_held == stats.host_pages_held == 0
    if "data_parallel_size" not in SPLITS[split]:
        check_checksums(checksums, SPLITS[split])


@on_gpu
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("split", ["TP 2", "PP 2", "DP 2"])
def test_ranks_on_one_gpu_that_draft_give_the_retrieval_answers_of_one_process(split: str, tiers: str) -> None:
    asked, _, counts = questions()
    expected = retrieved_by_one_process("cuda")
    answered = answer_questions(**on_one_gpu(SPLITS[split]), **memory_of(tiers), speculate=3)
    for question, tokens in answered.answers:
        assert tokens[: counts[question]] == expected[question], f"question {question}: {asked[question].task}"
    assert sum(answered.stats.drafts_accepted.values()) > 0
    assert answered.stats.device_pages_held == answered.stats.host_pages_held == 0


@on_gpu
def test_ranks_on_one_gpu_start_again_without_drafts_that_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "pays", lambda costs, drafts: False)
    expected = retrieved_by_one_process("cuda")
    answered = answer_questions(**on_one_gpu(SPLITS["TP 2"]), **memory_of("auto"), speculate=None)
    assert all(tokens[: len(expected[question])] == expected[question] for question, tokens in answered.answers)
    assert not answered.stats.drafts_verified


def forced_logprobs(model: str, lengths: Sequence[int], tokens: int, **settings: Any) -> list[float]:
    """Returns the log-probabilities of answers that are forced, so that rounding never changes the context.

    Prompt i has `lengths[i]` random tokens, and its answer repeats token i. With several replicas, all prompts are
    computed once for each.
    """
    rng = random.Random(5)
    replicas = settings.get("data_parallel_size", 1)
    prompts = [rng.choices(range(50, 4000), k=length) for length in lengths]
    params = [
        SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, logit_bias={10 + number: FORCING_BIAS}
        )
        for number in range(len(prompts))
    ]
    with LLM(model, load_format="dummy", progress=False, **settings) as llm:
        check_graphs(llm, settings)
        outputs = llm.generate(copies(prompts, replicas), params * replicas)
        llm.audit()
    found: list[float] = []
    for number, output in enumerate(outputs):
        choice, forced = output.outputs[0], 10 + number % len(prompts)
        assert choice.token_ids == [forced] * tokens and choice.logprobs is not None
        found += [of_token[forced].logprob for of_token in choice.logprobs]
    return found


def mean_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the mean difference of log-probabilities, as a share of their standard deviation. `found` has
    those of several replicas one after another."""
    assert len(found) % len(expected) == 0
    repeated = [*expected] * (len(found) // len(expected))
    return statistics.mean(abs(one - other) for one, other in zip(found, repeated, strict=True)) / statistics.stdev(
        expected
    )


def check_logprobs(found: Sequence[float], expected: Sequence[float], what: str) -> None:
    """Asserts that log-probabilities equal the expected ones within rounding. Prints the mean difference."""
    mean = mean_difference(found, expected)
    print(f"{what}: the mean difference is {mean:.4f} of the standard deviation")
    assert mean <= MAX_DIFFERENCE, f"{what}: {mean:.4f} of the standard deviation"


RANDOM_LENGTHS, RANDOM_TOKENS = (5, 64, 300, 700, 33, 128, 500, 900), 80


def model_directory(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    return tiny_directory(folder, **config)


@lru_cache
def random_logprobs_of_one_process(model: str, folder: str, device: str) -> list[float]:
    settings: dict[str, Any] = SMALL | {"device": device, "tiers": "off", "device_kv_tokens": 16384}
    return forced_logprobs(folder, RANDOM_LENGTHS, RANDOM_TOKENS, **settings)


def check_random_model(model: str, split: dict[str, int], tiers: str, folder: str, device: dict[str, Any]) -> None:
    expected = random_logprobs_of_one_process(model, folder, device["device"])
    found = forced_logprobs(folder, RANDOM_LENGTHS, RANDOM_TOKENS, **SMALL, **device, **split, **memory_of(tiers))
    check_logprobs(found, expected, f"{model}, {split}, tiers {tiers}")


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: model_directory(folder / name, config) for name, config in RANDOM_MODELS.items()}


@on_gpu
@pytest.mark.parametrize(("model", "tiers"), [*product(["dsa"], TIERS), ("gqa", "off"), ("gqa", "auto")])
@pytest.mark.parametrize("split", SPLITS)
def test_ranks_on_one_gpu_give_equal_logits(
    model: str, split: str, tiers: str, random_models: dict[str, str], checksums: Path
) -> None:
    device = {key: value for key, value in on_one_gpu(SPLITS[split]).items() if key not in SPLITS[split]}
    check_random_model(model, SPLITS[split], tiers, random_models[model], device)
    if "data_parallel_size" not in SPLITS[split]:
        check_checksums(checksums, SPLITS[split])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "split"), [("dsa", "TP 2"), ("gqa", "DP 2")])
def test_these_checks_pass_on_a_cpu(model: str, split: str, random_models: dict[str, str], checksums: Path) -> None:
    device = {"device": "cpu", "dtype": "float32"}
    check_random_model(model, SPLITS[split], "auto", random_models[model], device)
    if "data_parallel_size" not in SPLITS[split]:
        check_checksums(checksums, SPLITS[split])


def test_checks_fail_if_logits_or_residual_streams_differ(tmp_path: Path) -> None:
    rng = random.Random(1)
    expected = [rng.gauss(-8, 1) for _ in range(500)]
    check_logprobs([value + 0.01 for value in expected * 2], expected, "rounding")
    with pytest.raises(AssertionError, match="standard deviation"):
        check_logprobs(expected[1:] + expected[:1], expected, "other logits")
    for rank, checksums in enumerate(([5, 6, 0, 0], [5, 7, 0, 0])):
        (tmp_path / f"layer-0-rank-{rank}.json").write_text(json.dumps(checksums))
    with pytest.raises(AssertionError, match="the ranks differ"):
        check_checksums(tmp_path, {"tensor_parallel_size": 2})


FP8: dict[str, Any] = {
    "kv_dtype": "fp8",
    "index_dtype": "fp8",
    "tiers": "off",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "max_model_len": 4096,
    "device_kv_tokens": 16384,
}


@pytest.fixture(scope="module")
def full_size_models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Returns directories with the configuration of DeepSeek-V3.2 in fp8, but fewer layers and experts."""
    path = Path(DEMO).parents[1] / "hotset" / "lab" / "plan" / "configs" / "deepseek-v3.2.json"
    folder, full = tmp_path_factory.mktemp("full_size"), json.loads(path.read_text())
    fewer = {"n_routed_experts": FP8_EXPERTS, "first_k_dense_replace": 1}
    return {
        layers: model_directory(folder / str(layers), full | fewer | {"num_hidden_layers": layers})
        for layers in (FEW_FP8_LAYERS, FP8_LAYERS)
    }


@lru_cache
def full_size_logprobs(folder: str, **settings: Any) -> list[float]:
    found = forced_logprobs(folder, (16, 700, 3000, 2500), 24, device="cuda", **FP8, **settings)
    gc.collect()
    torch.cuda.empty_cache()  # otherwise torch keeps the memory of the weights, which the next engine needs
    return found


def rounded_differently(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Changes the output of attention or of an MLP by about one unit in the last place of bfloat16."""

    def changed(*arguments: Any) -> Any:
        out, *others = computed if isinstance(computed := compute(*arguments), tuple) else (computed,)
        signs = torch.arange(out.shape[1], device=out.device).mul(7919).bitwise_and(64).div(32).sub(1)
        out = (out.float() * (1 + 2**-8 * signs)).to(out.dtype)
        return (out, *others) if others else out

    return changed


@lru_cache
def mean_difference_by_rounding(folder: str) -> float:
    """Returns how far the log-probabilities of one process differ from those of one that rounds differently."""
    load = ModelLoader.load

    def load_and_change(loader: ModelLoader, *arguments: Any) -> Decoder:
        decoder = load(loader, *arguments)
        decoder._layers = [
            replace(layer, attention=rounded_differently(layer.attention), mlp=rounded_differently(layer.mlp))  # type: ignore[arg-type]
            for layer in decoder._layers
        ]
        return decoder

    expected = full_size_logprobs(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ModelLoader, "load", load_and_change)
        found = full_size_logprobs(folder, seed=1)  # the seed only distinguishes this call: all tokens are forced
    return mean_difference(found, expected)


@on_gpu
@pytest.mark.parametrize("split", ["TP 2", "DP 2"])
def test_two_ranks_with_full_size_fp8_shapes_give_equal_logits(split: str, full_size_models: dict[int, str]) -> None:
    """With few layers, the log-probabilities must agree within MAX_DIFFERENCE. With many layers, rounding changes fp8
    codes and choices of experts. The difference is then compared with that of one process whose results are rounded.
    """
    few, many = full_size_models.values()
    found = full_size_logprobs(few, gpus="0", ranks_per_gpu=2, **SPLITS[split])
    check_logprobs(found, full_size_logprobs(few), f"fp8, {FEW_FP8_LAYERS} layers, {split}")
    found = full_size_logprobs(many, gpus="0", ranks_per_gpu=2, **SPLITS[split])
    mean, by_rounding = mean_difference(found, full_size_logprobs(many)), mean_difference_by_rounding(many)
    print(f"fp8, {FP8_LAYERS} layers, {split}: the mean difference is {mean:.4f}, by rounding {by_rounding:.4f}")
    assert mean <= 1.2 * by_rounding
