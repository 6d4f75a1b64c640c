"""The measurements of decode.py and of one_rank.py are correct at a small size, on a CPU."""

import argparse
import json
from pathlib import Path

import decode
import decode_cases
import pytest
import torch
from decode import SPLITS, RankRun, Results, make_options
from decode_cases import Case, Rank
from decode_limits import Rates, fp8_operands, link_seconds, step_bytes
from decode_load import max_requests_with_prefix
from decode_server import (
    CONFIGS,
    FP8_KV,
    PEER_TOKENS,
    RankServer,
    SharedHostPages,
    SimulatedRanks,
    WeightBytes,
    load_spec,
    planned_bytes,
    random_weights,
)
from speculation import DRAFTS
from step_profile import DEFINITION, GAPS, OTHER, KernelRun, group_of, grouped_ms, layer_rows, without_waits

import hotset.kernels
from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.build import build_engine
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor
from hotset.engine.sizing import KvBudget, hot_slots, kv_budget
from hotset.lab.plan.products import product_rates, prompt_work
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.decoder import Decoder, worker_kv_shape
from hotset.models.families import read_spec
from hotset.models.spec import ModelSpec
from hotset.models.split import WHOLE_MODEL

CPU = torch.device("cpu")
RATES = Rates(copy=1e12, fp8=1e12, bf16=1e12, fp32=1e12)
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["sparse", "dense"],
    "num_attention_heads": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 128,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_topk": 8,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
MOE_LAYERS = 1
CONTEXT, GROWTH = 512, 64


def small_config(width: int) -> dict[str, object]:
    """Returns the configuration of GLM-5.2 with few and small layers. Eight tensor parallel ranks need MLPs with a
    `width` of 1024."""
    config = json.loads((CONFIGS / "glm-5.2.json").read_text())
    return config | SMALL | {"intermediate_size": width, "moe_intermediate_size": width}


def small_spec(width: int = 128) -> ModelSpec:
    return read_spec(small_config(width), {}, "small")


def small_options(tmp_path: Path, *flags: str) -> argparse.Namespace:
    """Returns options with which the device holds 3 resident or 5 tiered requests, and the host 4."""
    load = f"--model glm-5.2 --split dp8 --temperature 1 --context {CONTEXT} --requests 99"
    sizes = f"{load} --prefill 48 --prefill-chunk 32 --seats 12 --steps 3"
    memory = "--device-gib 0.000745 --host-gib 0.000964"
    outputs = ["--json", str(tmp_path / "rank.json"), "--markdown", str(tmp_path / "rank.md")]
    return make_options().parse_args([*sizes.split(), *memory.split(), *outputs, *flags])


def run(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, spec: ModelSpec | None = None, rates: Rates = RATES
) -> Results:
    monkeypatch.setattr(decode, "GROWTH", GROWTH)
    monkeypatch.setattr(decode_cases, "WARM_UP_STEPS", 3)
    monkeypatch.setattr(decode_cases, "CHECKED_STEPS", 4)
    spec = spec or small_spec(1024 if options.split == "tp8" else 128)
    rank_run = RankRun(options, "glm-5.2", spec, rates, CPU, torch.float32, Results())
    rank_run.measure()
    assert rank_run.results.failures == []
    return rank_run.results


def test_one_run_measures_prompt_and_decode_with_every_mode_of_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run(small_options(tmp_path, "--shared-prefix", "448"), monkeypatch)
    (weights,), (prompt,), (off, distinct, shared, *reusing) = results.weights, results.prefill, results.serving
    assert weights["expected GB"] == weights["loaded GB"] > weights["of which experts GB"] > 0
    assert weights["differ"] == 0, "a tiered request must get the tokens of a resident one"
    assert prompt["seconds"] > 0 and prompt["products s"] == pytest.approx(sum(prompt["products ms"].values()) / 1e3)
    assert [row["host pages"] for row in results.serving] == ["", "distinct", "shared", *["shared prefix"] * 2]
    most, as_many = reusing
    assert most["requests"] == most["tiered"] > as_many["requests"] == distinct["requests"]
    assert off["requests"] < distinct["requests"] < shared["requests"] == shared["tiered"]
    assert off["tiered"] == off["miss"] == off["host GB/s"] == 0 < shared["miss"] < 1 and shared["host GB/s"] > 0
    for row in results.serving:
        assert row["finite"] and 0.5 <= row["experts"] <= 1 and 0 < row["p50 ms"] <= row["p99 ms"]
        assert row["sampling ms"] > 0
        assert row["collectives"] == 2 * MOE_LAYERS, "a gather and a sum in each MoE layer"
        assert row["tokens/s"] == pytest.approx(row["requests"] / row["step ms"] * 1e3)
        assert row["step / bytes"] == pytest.approx(row["step ms"] / row["bytes ms"])
    written = json.loads((tmp_path / "rank.json").read_text())["results"]
    assert written["Decode"] == results.serving and written["Bars"][0]["verdict"] == "met"
    assert "| glm-5.2 | dp8 | 512 | auto | 0 | shared |" in (tmp_path / "rank.md").read_text()


def test_a_whole_model_also_decodes_without_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--split one --temperature 0 --prefill 0 --requests 1 --all-hits 2"
    results = run(small_options(tmp_path, *flags.split()), monkeypatch)
    assert all(row["collectives"] == 0 and row["experts"] > 0 for row in results.serving)
    resident, tiered = [row for row in results.serving if not row["misses"]]
    assert (resident["tiers"], tiered["tiers"]) == ("off", "always")
    assert resident["requests"] == tiered["requests"] == tiered["tiered"] == 2 and tiered["miss"] == 0
    whats = " ".join(bar.what for bar in results.bars())
    assert "1 requests, all resident: auto / off" in whats and "step without misses, tiered / resident" in whats


def test_tiers_and_drafts_decode_alone_and_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(small_config(128) | {"num_nextn_predict_layers": 1}, {}, "small", with_mtp=True)
    flags = f"--split one --temperature 0 --prefill 0 --drafts 0 {DRAFTS} --device-gib 0.0013 --host-gib 0.004"
    monkeypatch.setattr(decode_cases, "MAX_ANSWER", 128)
    results = run(small_options(tmp_path, *flags.split()), monkeypatch, spec)
    rows = {(row["tiers"], row["drafts"]): row for row in results.serving if row["host pages"] in ("", "distinct")}
    off, tiered, off_drafts, tiered_drafts = rows.values()
    assert list(rows) == [("off", 0), ("auto", 0), ("off", DRAFTS), ("auto", DRAFTS)]
    assert off["requests"] == off_drafts["requests"] < tiered_drafts["requests"] <= tiered["requests"]
    assert off["per step"] == tiered["per step"] == 1 < min(off_drafts["per step"], tiered_drafts["per step"])
    assert off["rows/token"] == off_drafts["rows/token"] == 0 < min(tiered["rows/token"], tiered_drafts["rows/token"])
    assert off_drafts["bytes ms"] is None and off["bytes ms"] > 0


def test_more_than_twice_as_many_contexts_of_128k_fit_if_they_share_96k() -> None:
    spec = load_spec("dsa-50b")
    assert isinstance(spec.attention, MlaSpec)
    shape = worker_kv_shape(spec, torch.bfloat16, FP8_KV)
    geometry = shape.geometry(64, hot_slots(EngineConfig(), shape.topk))
    gib, tokens = 1 << 30, 131072 + 512
    budget = KvBudget(geometry, 16 * gib // geometry.page_bytes, 80 * gib // (64 * shape.token_bytes), tokens)
    assert budget.requests(tokens) == 20
    shared = max_requests_with_prefix(budget, tokens, 98304)
    keys, rows = geometry.whole_key_pages(98304), 98304 // 64
    assert keys + shared * (geometry.tiered_pages(tokens) - keys) <= budget.device_pages
    assert rows + shared * (geometry.row_pages(tokens) - rows) <= budget.host_pages
    assert shared > 50


@pytest.mark.slow
def test_tensor_parallel_rank_computes_an_eighth_of_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run(small_options(tmp_path, "--split", "tp8"), monkeypatch)
    for row in results.serving:
        assert row["finite"] and row["tokens/s"] == pytest.approx(row["requests"] / row["step ms"] * 1e3 / 8)
        assert row["collectives"] == 2 + 2 * SMALL["num_hidden_layers"], "embedding, logits, two sums in each layer"


def tokens(engine: Engine, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (choice,) = InputProcessor(engine.card, seed=0).accept("0", prompt, params)
    engine.add(choice)
    answer: list[int] = []
    while not engine.idle:
        answer += engine.step().token_ids
    return answer


def test_one_rank_of_one_gives_the_tokens_of_a_plain_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config(128)))
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        tiers="off",
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=128,
        device_kv_tokens=256,
        kv_dtype="fp8",
        index_dtype="fp8",
    )
    spec, prompt = small_spec(), torch.randint(512, (40,)).tolist()
    ranks = SimulatedRanks(1, spec.hidden, spec.moe.experts, torch.float32, CPU)
    decoder = Decoder(spec, random_weights(spec, torch.float32, CPU), FP8_KV, WHOLE_MODEL, ranks)
    budget = kv_budget(config, decoder.kv_shape, spec.context, CPU)
    plain = build_engine(config)
    try:
        expected = tokens(plain, prompt)
    finally:
        plain.close()
    assert tokens(RankServer(decoder, spec, config, budget, None).engine(), prompt) == expected
    assert len(expected) == 6 and ranks.calls


def test_simulated_peers_send_as_many_tokens_as_this_rank() -> None:
    ranks = SimulatedRanks(8, 16, 32, torch.float32, CPU)
    x = torch.randn(PEER_TOKENS + 3, 16)
    (gathered,) = ranks.all_gather_tokens(x)
    peers = gathered[len(x) :].view(7, len(x), 16)
    assert gathered[: len(x)].equal(x) and gathered.shape == (8 * len(x), 16)
    assert peers[:, PEER_TOKENS:].equal(peers[:, :3]) and peers[:, :PEER_TOKENS].flatten(0, 1).unique(dim=0).shape[
        0
    ] == (7 * PEER_TOKENS), "the tokens of peers must differ, or they would choose the same experts"
    expert_ids, weights = torch.tensor([[4, 30], [-1, -1]]), torch.rand(2, 2)
    ids_of_all, weights_of_all = ranks.all_gather_tokens(expert_ids, weights)
    assert ids_of_all[::2].tolist() == [[(4 + 4 * rank) % 32, (30 + 4 * rank) % 32] for rank in range(8)]
    assert (ids_of_all[1::2] == -1).all() and weights_of_all.equal(weights.repeat(8, 1))
    torch.testing.assert_close(ranks.reduce_scatter(gathered), x + peers.sum(0))
    logits = ranks.all_gather_columns(x)
    assert logits.shape == (len(x), 8 * 16) and logits.argmax(1).equal(x.argmax(1)), "the own vocabulary must win"
    assert ranks.all_reduce(x).equal(x)


def test_bytes_between_gpus_are_those_of_each_collective() -> None:
    ranks = SimulatedRanks(8, 16, 32, torch.float32, CPU)
    x = torch.zeros(24, 16)
    for collective in (ranks.all_gather_tokens, ranks.reduce_scatter, ranks.all_reduce, ranks.all_gather_columns):
        collective(x)
    own = x.nbytes
    assert [call.link_bytes for call in ranks.calls] == [7 * own, 7 / 8 * own, 14 / 8 * own, 7 * own]
    assert link_seconds(ranks.calls) == pytest.approx((14 + 21 / 8) * own / 450e9)


def test_shared_host_pages_are_granted_again_when_all_are_held() -> None:
    pages = SharedHostPages(capacity=10, host_pages=4)
    assert pages.allocate(3) == [0, 1, 2] and pages.allocate(3, after=2) == [3, 0, 1] and pages.held == 6
    assert pages.allocate(5) is None
    pages.release([3, 0])
    assert pages.allocate(6) == [2, 3, 0, 1, 2, 3] and pages.free == 0


def test_bytes_of_a_step_are_those_of_the_published_shapes() -> None:
    spec = load_spec("deepseek-v3.2")
    assert isinstance(spec.attention, MlaSpec)
    shape = worker_kv_shape(spec, torch.bfloat16, FP8_KV)
    weights = WeightBytes(total=1000, embedding=100, experts=600)
    read = step_bytes(shape, weights, requests=3, context=32768, used_experts=0.5)
    rows, keys = 3 * 61 * 2048 * 656, 3 * 61 * 32768 * 132
    assert read == {"weights": 600.0, "index keys": float(keys), "rows": float(rows)}


@pytest.mark.parametrize(("name", "active"), [("deepseek-v3.2", 37e9), ("glm-5.2", 40e9)])
def test_products_of_a_token_are_those_of_the_published_active_weights(name: str, active: float) -> None:
    """A token is multiplied by every active weight once: 2 FLOP each. The embedding is only looked up."""
    spec = load_spec(name)
    one_token = prompt_work(spec, 0, 1)
    products, eighth = (
        {rate.name: rate.flops(one_token) for rate in product_rates(spec, SPLITS[split])} for split in ("dp8", "tp8")
    )
    flops = sum(products.values()) - products["sparse attention"] - products["index scores"]
    assert flops / 2 == pytest.approx(active, rel=0.04)
    assert eighth["routed experts"] == products["routed experts"] / 8
    assert eighth["index scores"] == products["index scores"]


def test_rate_of_fp8_products_is_that_of_two_matrices_in_fp8() -> None:
    operands = fp8_operands(256, CPU)
    for name in ("mat_a", "mat_b"):
        assert operands[name].shape == (256, 256) and operands[name].dtype == torch.float8_e4m3fn
    assert operands["scale_a"].shape == (256, 2) and operands["scale_b"].shape[1] == 2


def test_kernels_are_grouped_by_the_folder_that_defines_them() -> None:
    names = {
        "attend": "attention",
        "_score_kernel": "indexer",
        "select_best": "indexer",
        "copy_rows": "swap-in",
        "_gate_up_kernel": "experts",
        "_quantise_pairs_kernel": "experts",
        "_quantise_kernel": "linear",
        "_rms_norm_kernel": "norm/rope",
        "void at::native::CatArrayBatchedCopy<x, 2>(y)": "collectives",
        "void at::native::elementwise<copysign_kernel_cuda>(x)": "collectives",
        "nvjet_sm90_tst_128x8": "linear",
        "void at::native::elementwise_kernel<add>(x)": OTHER,
    }
    assert {name: group_of(name) for name in names} == names


def test_every_kernel_in_cuda_is_found() -> None:
    for source in Path(hotset.kernels.__file__).parent.glob("*/*.cu"):
        text = source.read_text()
        assert len(DEFINITION.findall(text)) == text.count("__global__"), source


def test_gaps_are_the_time_in_which_no_stream_runs_a_kernel() -> None:
    runs = [
        KernelRun("copy_rows", 50, 90),
        KernelRun("attend", 10, 40),
        KernelRun("attend", 20, 60),
        KernelRun("x", 95, 96),
    ]
    assert grouped_ms(runs, steps=2) == {"attention": 0.035, "swap-in": 0.02, GAPS: 0.0025, OTHER: 0.0005}
    assert grouped_ms([], steps=1) == {}


def test_a_kernel_that_started_early_counts_from_the_end_of_the_previous_one_on_its_stream() -> None:
    runs = [
        KernelRun("first", 0, 10),
        KernelRun("early", 4, 15),
        KernelRun("earlier", 5, 15),  # ends with the one before it
        KernelRun("late", 20, 25),
        KernelRun("copy", 2, 12, stream=1),
    ]
    times = {run.name: (run.start_us, run.end_us) for run in without_waits(reversed(runs))}
    assert times == {"first": (0, 10), "early": (10, 15), "earlier": (15, 15), "late": (20, 25), "copy": (2, 12)}


def test_a_layer_of_one_request_is_shown_kernel_by_kernel() -> None:
    layers = [("score", 0, 5), ("select_best", 6, 18), ("attend", 20, 27), ("_few_tokens_kernel", 28, 37)]
    runs = [KernelRun(name, 100 * n + first, 100 * n + last) for n in range(5) for name, first, last in layers]
    kernels = [(row["kernel"], row["start us"], row["us"], row["group"]) for row in layer_rows(runs)]
    assert kernels == [
        ("score", 0, 5, "indexer"),
        ("select_best", 6, 12, "indexer"),
        ("attend", 20, 7, "attention"),
        ("_few_tokens_kernel", 28, 9, "linear"),
    ]
    assert layer_rows(runs[1:3]) == []


def test_cases_without_time_are_skipped_and_a_failed_case_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    row = {
        "model": "m",
        "split": "s",
        "context": 1,
        "tiers": "off",
        "host pages": "",
        "tokens/s": 1.0,
        "profile ms": {},
        "finite": True,
        "drafts": 0,
        "misses": True,
        "tiered": 0,
        "idle": None,
    }

    def fake_measure(_rank: Rank, _server: RankServer, case: Case, *_: object, **__: object) -> dict[str, object]:
        now[0] += 40
        if case.requests == 3:
            raise RuntimeError("out of memory")
        return row | {"requests": case.requests}

    monkeypatch.setattr(decode, "GROWTH", GROWTH)
    monkeypatch.setattr(decode, "measure", fake_measure)
    options = small_options(tmp_path, "--tiers", "off", "--prefill", "0", "--requests", "1", "2", "--seconds", "100")
    rank_run = RankRun(options, "glm-5.2", small_spec(), RATES, CPU, torch.float32, Results(), clock=lambda: now[0])
    rank_run.measure()
    assert [row["requests"] for row in rank_run.results.serving] == [2]
    (failure,) = rank_run.results.failures
    assert failure["case"].startswith("3 requests") and "out of memory" in failure["error"]
    assert "skipped: 1 requests of 512 tokens, tiers off; 20 s are left" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [("deepseek-v3.2", 103e9), ("glm-5.2", 111e9)])
def test_rank_with_its_own_attention_and_an_eighth_of_the_experts_takes_the_expected_memory(
    name: str, expected: float
) -> None:
    planned = planned_bytes(load_spec(name), SPLITS["dp8"], torch.bfloat16, CPU)
    assert planned == pytest.approx(expected, rel=0.02)
