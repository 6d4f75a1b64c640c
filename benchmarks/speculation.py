"""Measures decoding with drafts against decoding without drafts. The share of accepted drafts is imposed.

    python benchmarks/speculation.py --device cuda --json speculation.json
    python benchmarks/speculation.py --quick            (a minute or two on a CPU)

The number of accepted drafts of a step is drawn at random, 1.65 of 3 on average, so that a step with drafts adds 2.65
tokens, as published for DeepSeek-V3.2. The MTP layer drafts and the model verifies as usual, and all sampled tokens are
kept. The answers have no meaning, but steps take as long as real ones. The number of drafts follows the measured costs,
as in a server.

    demo            the demo model
    one rank        DeepSeek-V3.2 with random weights and 32 of its 256 experts, like one of 8 data parallel ranks, but
                    without collectives
    tokens/s        of all requests, measured after all of them have begun to decode
    per step        tokens that a step adds to each answer
    gain            tokens/s with drafts / without

The second table shows how many rows of all index groups are copied from the host per token of an answer: for the demo
model with tiers always, its own drafts, and the same number of slots with and without drafts.
"""

import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import Bar, make_parser, report
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.base.sampling import SamplingParams
from hotset.engine.build import assemble, model_card
from hotset.engine.build_runner import build_runner
from hotset.engine.core import Engine
from hotset.engine.drafts import measuring
from hotset.engine.drafts.segments import SegmentTable
from hotset.engine.input_processor import InputProcessor
from hotset.engine.loading import ModelLoader, choose_device
from hotset.engine.sizing import KvBudget, kv_budget
from hotset.engine.warm_up import run_first_steps
from hotset.engine.workers.executor import InProcessExecutor
from hotset.kernels import EMPTY
from hotset.lab.evaluate.tasks import make_questions
from hotset.models.checkpoint.files import find_model
from hotset.models.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
DEMO = str(ROOT / "models" / "demo-dsa")
DEEPSEEK = ROOT / "hotset" / "lab" / "plan" / "configs" / "deepseek-v3.2.json"
DRAFTS = 3
SHARES = (0.75, 0.55, 0.35)  # of steps in which the first draft, the first two, all three are right: 1.65 on average
EXPERTS_OF_RANK = 32
PROMPT_TOKENS = 1024
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "index_n_heads": 4,
    "index_head_dim": 32, "index_topk": 64, "intermediate_size": 64, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32, "vocab_size": 512, "quantization_config": None, "max_position_embeddings": 4096,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: str
    requests: int
    min_gain: float  # the bar
    settings: dict[str, Any]


@contextmanager
def imposed_acceptance() -> Iterator[None]:
    """Lets steps accept drafts as if they were right with the probabilities of SHARES."""
    accepted_of = SegmentTable.accepted

    def accepted(table: SegmentTable, token_ids: Tensor) -> Tensor:
        verified = (table.verified != EMPTY).sum(1)
        drawn = torch.rand(verified.shape[0], 1, device=verified.device)
        return torch.minimum(verified, sum((drawn < share).long() for share in SHARES)[:, 0])

    SegmentTable.accepted = accepted  # type: ignore[method-assign]
    try:
        yield
    finally:
        SegmentTable.accepted = accepted_of  # type: ignore[method-assign]


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Loaded:
    """An engine with its KV memory. It is built, and its draft costs are measured, as in `hotset serve`."""

    def __init__(
        self, model: str, device: torch.device, speculate: int, decoders: dict[tuple[str, bool], Any], **settings: Any
    ) -> None:
        """`decoders` keeps the loaded model for later engines."""
        self.config = EngineConfig(model=model, device=device.type, speculate=speculate, **settings)
        loader = ModelLoader(self.config, device)
        spec, kind = loader.files.spec, (model, speculate > 0)
        if kind not in decoders:
            decoders.clear()
            _free_memory()
            decoders[kind] = loader.load(lambda done, total: None)
        decoder = decoders[kind]
        self.vocab = spec.vocab
        self.budget: KvBudget = kv_budget(self.config, decoder.kv_shape, spec.context, device)
        card = model_card(self.config, spec, self.budget, device, loader.dtype)
        executor = InProcessExecutor(build_runner(self.config, decoder, self.budget, device, spec.vocab))
        run_first_steps(executor, self.budget, 1)
        executor.warm_up(lambda done, total: None)
        costs = measuring.measure_draft_costs(executor, self.config, self.budget, 1) if speculate else None
        self.engine: Engine = assemble(self.config, card, decoder.kv_shape, self.budget, executor, costs=costs)

    def close(self) -> None:
        self.engine.close()
        del self.engine
        _free_memory()


@dataclass(frozen=True, slots=True)
class Decoded:
    tokens: int
    steps: int
    seconds: float
    rows: int  # copied from the host


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    seconds: float,
    *,
    most: int | None = None,
    warm_up: int = 8,
) -> Decoded:
    """Decodes all prompts together until each has `tokens` more tokens on average, or for `seconds` seconds.

    The measurement begins `warm_up` steps after all requests have their first token. No answer has more than `most`
    tokens.
    """
    processor = InputProcessor(engine.card, seed=0)
    params = SamplingParams(temperature=0, max_tokens=most or 4 * tokens + 64, ignore_eos=True)
    waiting = set()
    for number, prompt in enumerate(prompts):
        for choice in processor.accept(str(number), list(prompt), params):
            waiting.add(choice.request_id)
            engine.add(choice)
    names = list(waiting)
    while waiting:
        waiting -= set(engine.step().request_ids)
    for _ in range(warm_up):
        engine.step()
    before, start, done = engine.stats(), time.perf_counter(), 0
    while done < tokens * len(prompts) and time.perf_counter() - start < seconds:
        done += len(engine.step().token_ids)
    taken, after = time.perf_counter() - start, engine.stats()
    for name in names:
        engine.abort(name)
    while not engine.idle:
        engine.step()
    rows = sum(after.slot_misses.values()) - sum(before.slot_misses.values())
    return Decoded(done, after.steps - before.steps, taken, rows)


def random_prompts(count: int, vocab: int, tokens: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(2, vocab) for _ in range(tokens)] for _ in range(count)]


def measure_gains(cases: Sequence[Case], device: torch.device, tokens: int, seconds: float) -> list[dict[str, Any]]:
    """Returns a row for each case, with and without drafts. Each model is loaded once with the MTP layer and once
    without."""
    results: dict[tuple[str, int, int], Decoded] = {}
    decoders: dict[tuple[str, bool], Any] = {}
    for model, speculate in dict.fromkeys((case.model, speculate) for case in cases for speculate in (DRAFTS, 0)):
        for case in (case for case in cases if case.model == model):
            with imposed_acceptance():  # graphs capture it
                loaded = Loaded(model, device, speculate, decoders, **case.settings)
                length = min(PROMPT_TOKENS, loaded.budget.max_model_len // 2)
                prompts = random_prompts(case.requests, loaded.vocab, length)
                result = decode(loaded.engine, prompts, tokens, seconds)
                loaded.close()
            results[case.name, case.requests, speculate] = result
            print(case.name, case.requests, speculate, f"{result.tokens / result.seconds:.1f} tokens/s", flush=True)
    return [_gain(case, *(results[case.name, case.requests, speculate] for speculate in (0, DRAFTS))) for case in cases]


def _gain(case: Case, plain: Decoded, drafted: Decoded) -> dict[str, Any]:
    without, with_drafts = plain.tokens / plain.seconds, drafted.tokens / drafted.seconds
    return {
        "case": case.name,
        "requests": case.requests,
        "plain tokens/s": round(without, 1),
        "drafts tokens/s": round(with_drafts, 1),
        "per step": round(drafted.tokens / drafted.steps / case.requests, 2),
        "gain": round(with_drafts / without, 3),
    }


def measure_rows(device: torch.device, questions: int, length: int, tokens: int, seconds: float) -> dict[str, Any]:
    """Returns the rows copied from the host per token, with the demo model's own drafts and selections."""
    slots = (DRAFTS + 2) * 128
    tokenizer = Tokenizer.load(find_model(DEMO), None)
    assert tokenizer is not None
    asked = make_questions(["several"], length, questions, 3, lambda text: 1 + len(tokenizer.encode(text)))
    prompts = [tokenizer.encode("<|bos|>" + question.prompt) for question in asked]
    rows, lengths = [], []
    for speculate in (0, DRAFTS):
        sizes = {"max_num_seqs": questions, "max_model_len": 8192, "hot_slots": slots}
        memory = {"device_kv_tokens": 8192 * questions, "host_kv_tokens": 16384 * questions}
        loaded = Loaded(DEMO, device, speculate, {}, tiers="always", prefix_cache=False, **sizes, **memory)
        result = decode(loaded.engine, prompts, tokens, seconds)
        loaded.close()
        rows.append(result.rows / result.tokens)
        lengths.append(result.tokens / result.steps / questions)
    return {
        "requests": questions,
        "slots": slots,
        "plain rows/token": round(rows[0], 1),
        "drafts rows/token": round(rows[1], 1),
        "per step": round(lengths[1], 2),
        "ratio": round(rows[1] / max(rows[0], 1e-9), 3),
    }


def one_rank_model(folder: Path, layers: int | None, *, tiny: bool) -> str:
    """Writes the configuration of one rank's share of DeepSeek-V3.2, and returns its folder."""
    fields = json.loads(DEEPSEEK.read_text()) | {"n_routed_experts": EXPERTS_OF_RANK}
    fields |= TINY if tiny else {}
    fields |= {} if layers is None else {"num_hidden_layers": layers}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in fields.items() if value is not None})
    )
    return str(folder)


def cases(one_rank: str, *, quick: bool) -> list[Case]:
    demo: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 4096, "tiers": "off", "device_kv_gib": 0.25}
    rank: dict[str, Any] = {"load_format": "dummy", "tiers": "off", "max_model_len": 4096}
    rank |= {"device_kv_gib": 0.05} if quick else {"kv_dtype": "fp8", "index_dtype": "fp8"}
    batches = {1: 1.2, 4: 0.98} if quick else {1: 1.2, 16: 1.6, 32: 1.6, 128: 0.98}
    return [
        Case("demo", DEMO, 1, 1.6, demo),
        *(Case("one rank", one_rank, count, gain, rank | {"max_num_seqs": count}) for count, gain in batches.items()),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny models and few tokens; bars are not checked")
    parser.add_argument("--layers", type=int, help="layers of the one-rank model, instead of 61")
    parser.add_argument("--only", choices=("gain", "rows"), help="only one of the tables")
    parser.add_argument("--seconds", type=float, default=20.0, help="limit of each timed run")
    options = parser.parse_args()
    device = choose_device(options.device)
    tokens, seconds = (12, min(options.seconds, 5.0)) if options.quick else (256, options.seconds)
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as folder:
        one_rank = one_rank_model(Path(folder), options.layers, tiny=options.quick)
        listed = cases(one_rank, quick=options.quick)
        if options.only in (None, "gain"):
            rows = measure_gains(listed, device, tokens, seconds)
            for case, row in zip(listed, rows, strict=True):
                bars.append(Bar(f"{case.name}, {case.requests} requests: gain", row["gain"], case.min_gain, True))
            report("2.65 tokens per step imposed", rows, options.json)
        if options.only in (None, "rows"):
            fetched = measure_rows(device, 1 if options.quick else 8, 1024 if options.quick else 3072, tokens, seconds)
            report("Rows from the host", [fetched], None)
            bars.append(Bar("rows per token with drafts / without", fetched["ratio"], 1.4))
    report("Bars", [bar.row() for bar in bars], None)
    sys.exit(not options.quick and not all(bar.met for bar in bars))


if __name__ == "__main__":
    main()
