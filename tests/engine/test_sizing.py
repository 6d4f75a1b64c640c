"""Sizing of the pools: tiers never lower concurrency, and sizes that do not fit are refused with the numbers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from fake_files import write_files
from harness import CPU, RandomWeights, make_engine
from hypothesis import assume, given
from hypothesis import strategies as st

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.errors import ConfigError, ContextLengthExceeded, RequestError
from hotset.base.host_memory import host_memory
from hotset.base.request_options import RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.base.units import MIB
from hotset.engine import sizing
from hotset.engine.input_processor import InputProcessor, ModelCard
from hotset.engine.model_checks import kv_storage
from hotset.engine.sizing import KvBudget, WorkerMemory, kv_budget, shared_budget
from hotset.kernels.rows import RowLayout, gqa_row, index_key_row, mla_row
from hotset.memory.device_pool import KvShape
from hotset.models.attention.gqa_spec import GqaSpec
from hotset.models.decoder import Decoder
from hotset.models.spec import ModelSpec, RopeSpec

DSA = KvShape(3, mla_row(16, 4, torch.float32), (0, 1, 2), index_key_row(8, torch.float32), topk=6)
MLA = mla_row(512, 64, torch.bfloat16, fp8=True)
GQA = KvShape(2, gqa_row(2, 8, torch.float32))


@st.composite
def shapes(draw: st.DrawFn) -> KvShape:
    layers = draw(st.integers(1, 6))
    row = RowLayout(draw(st.integers(1, 80)), torch.bfloat16)
    if draw(st.integers(0, 4)) == 0:
        return KvShape(layers, row)
    full = (0, *sorted(draw(st.sets(st.integers(1, layers - 1))))) if layers > 1 else (0,)
    key = RowLayout(draw(st.integers(1, 40)), torch.bfloat16, align=4)
    return KvShape(layers, row, full, key, topk=draw(st.integers(1, 12)))


def budget(shape: KvShape, tiers: TiersMode, context: int = 4000, **changes: Any) -> KvBudget:
    return kv_budget(EngineConfig(tiers=tiers, **changes), shape, context, CPU)


@examples(100)
@given(
    shapes(), st.integers(1, 64), st.integers(20, 3000), st.integers(0, 20), st.sampled_from(["smallest", "default"])
)
def test_defect_20_tiers_keep_concurrency(
    shape: KvShape, page_rows: int, tokens: int, more_slots: int, host: str
) -> None:
    if shape.groups:
        assume(shape.key is not None and page_rows * shape.row.stride_bytes >= shape.key.stride_bytes)
    changes: dict[str, Any] = {"page_rows": page_rows, "device_kv_tokens": tokens}
    off = budget(shape, "off", **changes)
    if shape.groups:
        changes["hot_slots"] = shape.topk + more_slots
    if host == "smallest":
        changes["host_kv_tokens"] = smallest_host_tokens(shape, changes)
    auto = budget(shape, "auto", **changes)
    assert auto.device_pages >= off.device_pages
    assert auto.max_model_len >= off.max_model_len and auto.resident_len >= off.resident_len
    for length in {*range(1, 130), *range(130, off.max_model_len + 1, 7), off.max_model_len}:
        assert auto.requests(length) >= off.requests(length), f"contexts of {length} tokens"


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_all_stages_get_the_key_pages_of_the_stage_with_the_most_groups_per_layer(stages: int) -> None:
    """The 78 layers of GLM-5.2 are divided where a group begins. The first stage has the most groups per layer."""
    full = (0, 1, 2, *range(6, 78, 4))
    bounds = [*(full[number * len(full) // stages] for number in range(stages)), 78]
    key = index_key_row(128, torch.bfloat16, fp8=True)
    shapes = [
        KvShape(last - first, MLA, tuple(layer - first for layer in full if first <= layer < last), key, topk=2048)
        for first, last in pairwise(bounds)
    ]
    config = EngineConfig(device_kv_tokens=4096, host_kv_tokens=8192)
    workers = [WorkerMemory(shape, 1 << 40) for shape in shapes]
    common = shared_budget(config, workers, 4096, CPU).geometry
    alone = [shape.geometry(config.page_rows) for shape in shapes]
    for tokens in (1, 318, 319, 1000, 40_000, 131_072):
        assert common.key_pages(tokens) == max(geometry.key_pages(tokens) for geometry in alone)
    assert common.layers == min(shape.layers for shape in shapes)


def test_on_a_cpu_the_host_store_gets_only_what_weights_and_device_pool_leave() -> None:
    config = EngineConfig(device_kv_tokens=4096, host_kv_gib=1.0)
    shape = KvShape(2, MLA, (0, 1), index_key_row(128, torch.bfloat16), topk=64)
    assert shared_budget(config, [WorkerMemory(shape, 2 << 30)], 4096, CPU).host_pages
    with pytest.raises(ConfigError, match=r"--host-kv-gib needs 1024\.0 MiB of host memory, but only 50"):
        shared_budget(config, [WorkerMemory(shape, 1 << 29)], 4096, CPU)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sizes", [{}, {"device_kv_tokens": 640}, {"host_kv_gib": 0.01}])
def test_each_node_divides_its_own_memory_and_the_smallest_node_decides(sizes: dict[str, Any], device: str) -> None:
    def on_node(name: str, mib: int, workers: int = 2) -> list[WorkerMemory]:
        """Returns tensor parallel ranks of one node, which share one host store."""
        return [WorkerMemory(DSA, mib * MIB, number == 0, name, mib * MIB) for number in range(workers)]

    def budget_of(workers: list[WorkerMemory]) -> KvBudget:
        return shared_budget(EngineConfig(**sizes), workers, 4096, torch.device(device))

    small = budget_of(on_node("small", 40))
    assert budget_of(on_node("small", 40) + on_node("same", 40)) == small, "nodes do not share memory"
    assert budget_of(on_node("large", 4000) + on_node("small", 40) + on_node("larger", 9000)) == small
    if not sizes:
        assert budget_of(on_node("one", 40, workers=4)) != small or device == "cuda", "ranks of one node share memory"


def smallest_host_tokens(shape: KvShape, changes: dict[str, Any]) -> int:
    """Returns the smallest `host_kv_tokens` that is accepted with these settings."""
    low, high = 1, 1 << 16
    while low < high:
        middle = (low + high) // 2
        try:
            budget(shape, "auto", **changes, host_kv_tokens=middle)
        except ConfigError:
            low = middle + 1
        else:
            high = middle
    return low


@pytest.mark.parametrize("shape", [DSA, GQA], ids=["dsa", "gqa"])
def test_defect_20_the_device_pool_does_not_depend_on_the_host_store(shape: KvShape) -> None:
    pools = {
        budget(shape, "off", device_kv_gib=0.01).device_pages,
        *(budget(shape, "auto", device_kv_gib=0.01, host_kv_gib=gib).device_pages for gib in (0.02, 0.05, 0.2)),
    }
    assert len(pools) == 1


def test_with_tiers_a_context_can_be_longer_than_the_device_holds() -> None:
    off = budget(DSA, "off", page_rows=4, device_kv_tokens=200)
    auto = budget(DSA, "auto", page_rows=4, device_kv_tokens=200, host_kv_tokens=2000)
    assert auto.resident_len == off.max_model_len < auto.max_model_len
    assert auto.requests(auto.max_model_len) == 1 and auto.requests(150) > off.requests(150)


SMALL = {"page_rows": 4, "device_kv_tokens": 96}
REFUSED: list[tuple[str, KvShape, dict[str, Any], list[str]]] = [
    ("device too small", DSA, SMALL | {"tiers": "off", "max_model_len": 500}, ["500", "--device-kv-tokens", "device"]),
    ("device too small for tiers", DSA, SMALL | {"max_model_len": 4000}, ["4000", "--device-kv-tokens", "device"]),
    (
        "host too small",
        DSA,
        SMALL | {"max_model_len": 150, "host_kv_tokens": 120},
        ["120 tokens", "150", "--host-kv-tokens", "host"],
    ),
    ("host above free memory", DSA, SMALL | {"host_kv_gib": 1e6}, ["--host-kv-gib", "GiB", "free"]),
    ("host tokens above free memory", DSA, SMALL | {"host_kv_tokens": 10**13}, ["--host-kv-tokens", "GiB", "free"]),
    ("device above free memory", DSA, {"device_kv_gib": 1e6}, ["--device-kv-gib", "GiB", "free"]),
    ("host below device", DSA, SMALL | {"host_kv_tokens": 40}, ["40 tokens", "--host-kv-tokens", "--tiers off"]),
    ("host below device", GQA, SMALL | {"host_kv_tokens": 40}, ["40 tokens", "96", "--host-kv-tokens", "--tiers off"]),
    ("slots below top-k", DSA, SMALL | {"hot_slots": 5}, ["--hot-slots 5", "6 rows"]),
    ("too many slots", DSA, SMALL | {"hot_slots": 32_768}, ["--hot-slots 32768", "32767"]),
    (
        "slots below drafts",
        DSA,
        SMALL | {"hot_slots": 20, "speculate": 3},
        ["--hot-slots 20", "24 rows", "--speculate 3", "6 for each of 4 tokens"],
    ),
    ("too many drafts", DSA, SMALL | {"speculate": 6000}, ["--speculate 6000", "36012 slots", "32767"]),
    ("gqa always", GQA, SMALL | {"tiers": "always"}, ["--tiers always", "sparse attention"]),
    ("gqa slots", GQA, SMALL | {"hot_slots": 64}, ["--hot-slots", "sparse attention"]),
    ("longer than the model", DSA, SMALL | {"max_model_len": 4001}, ["--max-model-len 4001", "4000 tokens"]),
    ("page too small", KvShape(2, RowLayout(1, torch.uint8), (0, 1), index_key_row(64, torch.float32), 2),
     {"page_rows": 1}, ["--page-rows 1", "index key"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "changes", "quoted"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_sizes_that_do_not_fit_are_refused_with_flag(
    shape: KvShape, changes: dict[str, Any], quoted: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        kv_budget(EngineConfig(**changes), shape, 4000, CPU)
    assert "\n" not in str(refusal.value)
    for text in quoted:
        assert text in str(refusal.value)


@pytest.mark.parametrize("shape", [DSA, GQA], ids=["dsa", "gqa"])
def test_defect_26_pools_fit_a_control_group(shape: KvShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = 40 * MIB, 8 * MIB
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": limit, "sys/fs/cgroup/a/memory.current": used}
    write_files(tmp_path, files)
    monkeypatch.setattr(sizing, "host_memory", lambda: host_memory(tmp_path))
    sized = budget(shape, "auto", context=1 << 20)
    device_bytes = sized.device_pages * shape.layers * sized.geometry.layer_page_bytes
    host_bytes = sized.host_pages * shape.token_bytes * sized.geometry.page_rows
    assert 4 * MIB < device_bytes <= 8 * MIB  # a quarter of the 32 MiB that the group has left
    assert 4 * MIB < host_bytes <= limit - used - device_bytes
    with pytest.raises(ConfigError, match=r"--device-kv-gib needs 51\.2 MiB of memory, but only 32\.0 MiB are free"):
        budget(shape, "auto", context=1 << 20, device_kv_gib=0.05)


def test_the_largest_number_of_slots_is_accepted() -> None:
    assert budget(DSA, "auto", hot_slots=32_767, device_kv_tokens=9000).geometry.slots == 32_767


@pytest.mark.parametrize("setting", ["host_kv_gib", "host_kv_tokens", "hot_slots"])
def test_a_setting_without_effect_is_refused_when_tiers_are_off(setting: str) -> None:
    flag = f"--{setting.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{flag} would have no effect with --tiers off"):
        EngineConfig(tiers="off", **{setting: 8})


def gqa_spec() -> ModelSpec:
    attention = GqaSpec(heads=4, kv_heads=2, head_dim=8, qk_norm=True)
    return ModelSpec("qwen3", 61, 24, 2, 32, False, 1e-6, True, 96, RopeSpec(8), attention, None, "float32", (3,))


@pytest.mark.parametrize("setting", ["kv_dtype", "index_dtype"])
def test_fp8_is_refused_for_models_without_a_latent_kv(setting: str) -> None:
    flag = f"--{setting.replace('_', '-')} fp8"
    with pytest.raises(ConfigError, match=flag):
        kv_storage(EngineConfig(**{setting: "fp8"}), gqa_spec())


def card(**changes: Any) -> ModelCard:
    fields = {"max_model_len": 500, "tiers": True, "resident_len": 200} | changes
    return ModelCard("m", "m", vocab=61, eos_ids=(), device="cpu", dtype="float32", **fields)


REQUESTS: list[tuple[str, dict[str, Any], int, int, str, list[str]]] = [
    ("longer than the context", {}, 490, 11, "auto", ["500 tokens", "501", "490", "11"]),
    ("longer than a resident context", {}, 190, 11, "resident", ["200 tokens", "201", "tiers"]),
    ("tiered without tiers", {"tiers": False}, 10, 10, "tiered", ["'tiered'", "leave it out"]),
    ("no such tier", {}, 10, 10, "warm", ["auto, resident, tiered", "'warm'"]),
]


@pytest.mark.parametrize(
    ("changes", "prompt", "answer", "tiers", "quoted"),
    [case[1:] for case in REQUESTS],
    ids=[case[0] for case in REQUESTS],
)
def test_a_request_that_can_never_fit_is_refused(
    changes: dict[str, Any], prompt: int, answer: int, tiers: Any, quoted: list[str]
) -> None:
    with pytest.raises(RequestError) as refusal:
        params, options = SamplingParams(max_tokens=answer), RequestOptions(tiers)
        InputProcessor(card(**changes), seed=0).accept("r", [1] * prompt, params, options)
    # Only the cases that exceed a length quote more than two fragments.
    assert isinstance(refusal.value, ContextLengthExceeded) == (len(quoted) > 2 and tiers != "warm")
    assert "\n" not in str(refusal.value)
    for text in quoted:
        assert text in str(refusal.value)


def test_a_resident_request_without_max_tokens_ends_at_the_longest_resident_context() -> None:
    params, options = SamplingParams(max_tokens=None), RequestOptions("resident")
    choices = InputProcessor(card(), seed=0).accept("r", [1] * 20, params, options)
    assert [choice.max_length for choice in choices] == [200]


def test_the_scheduler_has_room_for_every_accepted_request() -> None:
    """The model card and the scheduler agree on what fits, so an accepted request fails no assertion of the
    scheduler."""
    model = Decoder(gqa_spec(), RandomWeights(torch.float32, seed=1))
    for tokens in (8, 9, 30, 33):
        engine = make_engine(model, gqa_spec(), page_rows=4, device_kv_tokens=tokens, host_kv_tokens=96)
        prompt = [1] * (engine.card.max_model_len - 1)
        for choice in InputProcessor(engine.card, seed=0).accept("r", prompt, SamplingParams(max_tokens=1)):
            engine.add(choice)
        while not engine.idle:
            engine.step()
