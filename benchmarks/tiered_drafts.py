"""Measures tiers and drafts together: a 50B model on one GPU, with and without each of them.

    python benchmarks/tiered_drafts.py --json tiered_drafts.json

The model is dsa-50b-dense with random weights and an MTP layer. Prompts are not computed and selections are synthetic,
as in serving.py. Consecutive tokens select rows that are as different as published for consecutive steps, whether one
step verifies them or several steps compute them. How many drafts of a step are right is imposed, as in speculation.py:
a step with 3 drafts adds 2.65 tokens. Every request has 3 drafts at every step, whatever they cost.

All four engines have the same weights and the same device memory for KV. Each decodes as many contexts as fit: with
tiers, hot buffers have 2 times top-k slots without drafts, and 5 times top-k with them.

    tokens/s       of all requests
    per step       tokens that a step adds to each answer
    rows/token     rows of all layers that are copied from the host, for each token of an answer
    of off         tokens/s / tokens/s with tiers off and without drafts, with contexts of the same length

Requires a GPU with 141 GB (H200) and 80 GiB of host memory to pin.
"""

import argparse
import gc
import json
import time
from typing import Any

import torch
from gpu_timing import require_gpu
from report import make_parser, report
from serving import CONFIGS, DTYPE, PAGE_ROWS, CountedWeights
from speculation import DRAFTS, decode, imposed_acceptance
from synthetic_prefill import SelectionOverride, SyntheticPrefillModel, SyntheticSelection
from torch import Tensor

from hotset.base.config import EngineConfig
from hotset.engine.build import assemble, model_card
from hotset.engine.decode_graphs import max_decoded
from hotset.engine.runner import Runner
from hotset.engine.sizing import KvBudget, kv_budget
from hotset.engine.workers.executor import InProcessExecutor
from hotset.memory.device_pool import DevicePool
from hotset.memory.host_store import HostStore
from hotset.memory.view import View
from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.decoder import Decoder
from hotset.models.families import read_spec
from hotset.models.mtp import MtpOutput
from hotset.models.spec import KvStorage, ModelSpec
from hotset.tiers.kv_memory import KvMemory

MODEL = "dsa-50b-dense"
CHUNK = 16384  # prompt tokens per step
SEATS = 64  # with 3 drafts of each, a step has as many tokens as an engine verifies at once
ANSWER = 1024  # maximum number of generated tokens; requests decode while the prompts of others are stored
WARM_UP_STEPS = 20  # enough for the LRU order to follow the selection


class SyntheticDraftingModel(SyntheticPrefillModel):
    """Drafts with the decoder's MTP layer, whose rows of prompts are random, too."""

    def mtp_input(self, x: Tensor) -> Tensor:
        return self._decoder.mtp_input(x)

    def run_mtp(self, token_ids: Tensor, hidden: Tensor, view: View, selected: Tensor | None = None) -> MtpOutput:
        if view.segments.decoding:
            assert self._selection is not None
            view = SelectionOverride(view, self._selection.positions(view.segments.positions))
            return self._decoder.run_mtp(token_ids, hidden, view, selected)
        count = token_ids.shape[0]  # `forward` has stored the rows of this layer, too
        return MtpOutput(hidden, hidden, self._empty_selection.expand(count, -1))

    def mtp_logits(self, normed: Tensor) -> Tensor:
        return self._decoder.mtp_logits(normed)


def drafting_spec() -> ModelSpec:
    path = CONFIGS / f"{MODEL}.json"
    return read_spec(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}, {}, str(path), with_mtp=True)


class Modes:
    """Engines with and without tiers and drafts, around one model and one host store."""

    def __init__(self, decoder: Decoder, options: argparse.Namespace, device: torch.device) -> None:
        self._decoder, self._options, self._device = decoder, options, device
        modes = [(tiers, drafts) for tiers in (False, True) for drafts in (0, DRAFTS)]
        self._budgets = {mode: self._budget(*mode) for mode in modes}  # before the host memory is pinned
        print(f"pinning {options.host_gib} GiB", flush=True)
        self._host = HostStore(decoder.kv_shape, self._budgets[True, 0].host_pages, PAGE_ROWS, device)

    def _budget(self, tiers: bool, drafts: int) -> KvBudget:
        decoder = self._decoder
        return kv_budget(self._config(tiers=tiers, drafts=drafts), decoder.kv_shape, decoder.spec.context, self._device)

    def _config(self, *, tiers: bool, drafts: int) -> EngineConfig:
        return EngineConfig(
            tiers="auto" if tiers else "off",
            speculate=drafts,
            max_num_seqs=SEATS,
            max_num_batched_tokens=CHUNK,
            device_kv_gib=self._options.device_gib,
            host_kv_gib=self._options.host_gib if tiers else None,
            max_model_len=max(self._options.contexts) + ANSWER,
            kv_dtype="fp8",
            index_dtype="fp8",
            page_rows=PAGE_ROWS,
            prefix_cache=False,  # prompts are the same, but none may share pages with another
        )

    def measure(self, context: int, *, tiers: bool, drafts: int) -> dict[str, Any]:
        """Decodes as many contexts as fit, and returns a row of the table."""
        config, shape, spec = self._config(tiers=tiers, drafts=drafts), self._decoder.kv_shape, self._decoder.spec
        budget = self._budgets[tiers, drafts]
        requests = min(budget.requests(context + ANSWER), SEATS)
        if tiers:
            requests = min(requests, budget.host_pages // budget.geometry.row_pages(context + ANSWER))
        start = time.perf_counter()
        executor = self._executor(config, budget, context)
        card = model_card(config, spec, budget, self._device, self._decoder.dtype)
        engine = assemble(config, card, shape, budget, executor)
        prompts = [[0] * context] * requests
        with imposed_acceptance():  # graphs, which contain it, are captured in the first steps
            tokens, limit = self._options.tokens, self._options.seconds
            result = decode(engine, prompts, tokens, limit, most=ANSWER, warm_up=WARM_UP_STEPS)
        row = {
            "context": context,
            "tiers": config.tiers,
            "drafts": drafts,
            "requests": requests,
            "slots": budget.geometry.slots if tiers else 0,
            "step ms": 1e3 * result.seconds / result.steps,
            "tokens/s": result.tokens / result.seconds,
            "per step": result.tokens / result.steps / requests,
            "rows/token": result.rows / result.tokens,
            "seconds": time.perf_counter() - start,
        }
        print(row, flush=True)
        return row

    def _executor(self, config: EngineConfig, budget: KvBudget, context: int) -> InProcessExecutor:
        attention = self._decoder.spec.attention
        assert isinstance(attention, MlaSpec)
        selection = SyntheticSelection.with_published_misses(attention.index.topk, context, self._device)
        model = SyntheticDraftingModel(self._decoder, selection, CHUNK + SEATS)
        pool = DevicePool(model.kv_shape, budget.geometry, budget.device_pages, self._device)
        memory = KvMemory(pool, self._host if budget.host_pages else None, SEATS, budget.max_model_len)
        memory.warm_up()
        runner = Runner(
            model,
            memory,
            SEATS,
            budget.max_model_len,
            self._decoder.spec.vocab,
            graphs=self._device.type == "cuda",
            mtp_drafts=config.max_drafts,
            max_verified=max_decoded(config),
        )
        return InProcessExecutor(runner)

    def close(self) -> None:
        self._host.close()


def measure_all(modes: Modes, contexts: list[int]) -> list[dict[str, Any]]:
    rows = []
    for context in contexts:
        measured = []
        for tiers in (False, True):
            for drafts in (0, DRAFTS):
                measured.append(modes.measure(context, tiers=tiers, drafts=drafts))
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
        rows += [row | {"of off": row["tokens/s"] / measured[0]["tokens/s"]} for row in measured]
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768, 131072], help="context lengths in tokens")
    parser.add_argument("--device-gib", type=float, default=16, help="GiB of device memory for KV")
    parser.add_argument("--host-gib", type=float, default=80, help="GiB of the host store")
    parser.add_argument("--tokens", type=int, default=64, help="timed tokens of each request")
    parser.add_argument("--seconds", type=float, default=10.0, help="limit of each timed run")
    options = parser.parse_args()
    require_gpu()
    device = torch.device("cuda")
    decoder = Decoder(drafting_spec(), CountedWeights(DTYPE, device), KvStorage(fp8_rows=True, fp8_keys=True))
    modes = Modes(decoder, options, device)
    report("Tiers and drafts", measure_all(modes, options.contexts), options.json, "2.65 tokens per step imposed")
    modes.close()


if __name__ == "__main__":
    main()
