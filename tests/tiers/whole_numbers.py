"""A decoder that computes in integers, the same decoder in plain Python, and a bench that compares the two.

Sums of integers do not depend on their order, so tokens and bytes are exact for every batch, chunk and residence. The
plain decoder uses only lists, without pages, seats or tiers. Equal scores are frequent, and the earlier position wins.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import torch
from imposed_drafts import ImposedDrafter
from tiers.byte_model import Poisoner, as_bytes
from torch import Tensor
from torch.nn import functional as F

from hotset.base.config import TiersChoice, TiersMode
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.core import Engine, Replica
from hotset.engine.input_processor import ModelCard
from hotset.engine.runner import Runner
from hotset.engine.workers.executor import InProcessExecutor
from hotset.kernels import EMPTY
from hotset.kernels.rows import RowLayout
from hotset.kernels.stable_topk import stable_topk
from hotset.memory.device_pool import DevicePool, KvShape
from hotset.memory.host_store import HostStore
from hotset.memory.pages import PageAllocator
from hotset.memory.view import View
from hotset.schedule.plan import TokenOutputs
from hotset.schedule.request import Request
from hotset.schedule.scheduler import Scheduler
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.ledger import Ledger
from hotset.tiers.prefix_cache import PrefixCache
from hotset.tiers.residence import PageUse, Residence

CPU = torch.device("cpu")
PRIME = 2**31 - 1
VOCAB = 97
LAYERS, TOPK, ROW_WIDTH, KEY_WIDTH = 4, 4, 5, 3
INDEXED = (0, 2)  # layers with an indexer; each shares its selection with the next layer
SHAPE = KvShape(LAYERS, RowLayout(ROW_WIDTH, torch.int16), INDEXED, RowLayout(KEY_WIDTH, torch.int16, align=4), TOPK)


class IntegerModel:
    """A `RunnerModel` that computes in integers. It records the selections of each segment's tokens."""

    device = CPU
    kv_shape = SHAPE

    def __init__(self) -> None:
        # Seat, position of the first token, and selections by group and token
        self.chosen: list[tuple[int, int, list[list[list[int]]]]] = []

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        hidden = _mix(token_ids.long() + 1, view.segments.positions + 1)
        selections: list[Tensor] = []
        for layer in range(LAYERS):
            view.new_rows(layer).store(_spread(hidden, layer, ROW_WIDTH, 1 << 16).short())
            if layer in INDEXED:
                new_keys = _spread(hidden, 100 + layer, KEY_WIDTH, 7).short()
                view.keys(len(selections)).store(view.segments.positions, new_keys)
                selections.append(self._choose(view, len(selections), _spread(hidden, 200 + layer, KEY_WIDTH, 7)))
            hidden = self._attend(view, layer, selections[-1], hidden)
        for _segment, first, last, length in view.segments:
            selected = [
                [[p for p in of_token if p != EMPTY] for of_token in positions[first:last].tolist()]
                for positions in selections
            ]
            self.chosen.append((int(view.seat_of[first]), length - (last - first), selected))
        return hidden

    def logits(self, hidden: Tensor, indices: Tensor | None) -> Tensor:
        tokens = hidden % VOCAB if indices is None else hidden[indices] % VOCAB
        return F.one_hot(tokens, VOCAB).float()

    def _choose(self, view: View, group: int, query: Tensor) -> Tensor:
        keys, chosen = view.keys(group), []
        for segment, first, last, length in view.segments:
            scores = (query[first:last] @ keys.gather(segment, length, torch.int64).T).double()
            later = torch.arange(length) > view.segments.positions[first:last, None]
            scores = F.pad(scores.masked_fill(later, float("-inf")), (0, TOPK), value=float("-inf"))
            chosen.append(stable_topk(scores, TOPK))
        return torch.cat(chosen)

    def _attend(self, view: View, layer: int, positions: Tensor, hidden: Tensor) -> Tensor:
        selected = view.select(layer, positions)
        rows = selected.layout.decode(selected.rows[selected.row_ids.clamp_min(0)], torch.int64)
        read = ((rows + (1 << 15)) * torch.arange(1, ROW_WIDTH + 1)).sum(-1)
        terms = torch.where(selected.row_ids == EMPTY, 0, _mix(read, positions + 1))
        return _mix(hidden, terms.sum(-1) % PRIME)


def _mix(a: Tensor, b: Tensor) -> Tensor:
    return (a * 48271 + b * 69621 + 12345) % PRIME


def _spread(hidden: Tensor, salt: int, width: int, values: int) -> Tensor:
    """Returns [tokens, width] pseudo-random integers around 0, each from a range of `values` integers."""
    return _mix(hidden[:, None], salt * 10 + torch.arange(width)) % values - values // 2


class PlainContext:
    """One context that is computed token by token in lists, with the arithmetic of `IntegerModel`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[list[list[int]]] = [[] for _ in range(LAYERS)]
        self.keys: list[list[list[int]]] = [[] for _ in INDEXED]
        self.ties = 0  # selections in which the last selected position and the best other position have equal scores

    def extend(self, token: int) -> int:
        """Appends a token and returns the token that follows it."""
        hidden = self._mixed(token + 1, len(self.tokens) + 1)
        self.tokens.append(token)
        chosen: list[int] = []
        for layer in range(LAYERS):
            self.rows[layer].append(self._spread(hidden, layer, ROW_WIDTH, 1 << 16))
            if layer in INDEXED:
                keys = self.keys[INDEXED.index(layer)]
                keys.append(self._spread(hidden, 100 + layer, KEY_WIDTH, 7))
                chosen = self._choose(keys, self._spread(hidden, 200 + layer, KEY_WIDTH, 7))
            total = 0
            for position in chosen:
                read = sum((value + (1 << 15)) * (j + 1) for j, value in enumerate(self.rows[layer][position]))
                total += self._mixed(read, position + 1)
            hidden = self._mixed(hidden, total % PRIME)
        return hidden % VOCAB

    def _choose(self, keys: list[list[int]], query: list[int]) -> list[int]:
        scores = [sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
        best = sorted(range(len(keys)), key=lambda position: (-scores[position], position))
        if len(best) > TOPK:
            self.ties += scores[best[TOPK - 1]] == scores[best[TOPK]]
        return best[:TOPK]

    @staticmethod
    def _mixed(a: int, b: int) -> int:
        return (a * 48271 + b * 69621 + 12345) % PRIME

    def _spread(self, hidden: int, salt: int, width: int, values: int) -> list[int]:
        return [self._mixed(hidden, salt * 10 + j) % values - values // 2 for j in range(width)]


@cache
def alone(prompt: tuple[int, ...], answer: int) -> PlainContext:
    """Returns the context of a prompt and an answer of `answer` tokens. The last token of the answer has no row."""
    context = PlainContext()
    for token in prompt:
        following = context.extend(token)
    for _ in range(answer - 1):
        following = context.extend(following)
    context.tokens.append(following)
    return context


@cache
def stored_alone(prompt: tuple[int, ...], answer: int) -> tuple[Tensor, Tensor]:
    """Returns the rows [layers, length, stride] and index keys [groups, length, stride] of `alone` as bytes."""
    context, key = alone(prompt, answer), SHAPE.key
    assert key is not None
    return _in_bytes(context.rows, SHAPE.row.stride_bytes), _in_bytes(context.keys, key.stride_bytes)


def _in_bytes(values: list[list[list[int]]], stride: int) -> Tensor:
    """Returns the values in little-endian 16-bit form. Rows are padded with zeros to the stride."""

    def one(row: list[int]) -> list[int]:
        return list(b"".join(value.to_bytes(2, "little", signed=True) for value in row).ljust(stride, b"\0"))

    return torch.tensor([[one(row) for row in rows] for rows in values], dtype=torch.uint8)


def prompt_of(name: str, length: int) -> tuple[int, ...]:
    return tuple((sum(map(ord, name)) * 31 + 17 * position * position) % VOCAB for position in range(length))


class Bench:
    """An engine over poisoned memory. The pools are audited after every step.

    After a step that leaves no command pending, the bytes on the host are also compared with the plain contexts, and
    every page without an owner is poisoned again. `finish` compares all answers.
    """

    def __init__(
        self,
        device_pages: int,
        host_pages: int,
        *,
        page_rows: int = 4,
        slots: int = 6,
        seats: int = 4,
        step_tokens: int = 64,
        tiers: TiersMode = "auto",
        depth: int = 1,
        context: int = 160,
        memory: type[KvMemory] = KvMemory,
        max_drafts: int = 0,
        right_drafts: float = 0.7,
    ) -> None:
        """If `max_drafts`, so many tokens are drafted for each request, of which the share `right_drafts` is right."""
        self.geometry = replace(SHAPE.geometry(page_rows, slots), max_drafts=max_drafts)
        self.ledger = Ledger(self.geometry, PageAllocator(device_pages), PrefixCache(host_pages))
        self.pool = DevicePool(SHAPE, self.geometry, device_pages, CPU)
        self.host = HostStore(SHAPE, host_pages, page_rows, CPU)
        self.poisoner = Poisoner(self.pool, self.host)
        self.memory = memory(self.pool, self.host, seats, context)
        self.drafter = ImposedDrafter(self._following, VOCAB, Random(max_drafts), right_drafts)
        self.scheduler = Scheduler(
            self.ledger,
            seats,
            step_tokens,
            tiers,
            drafter=self.drafter if max_drafts else None,
            max_drafts=max_drafts,
        )
        self.model = IntegerModel()
        card = ModelCard("whole", "whole", context, VOCAB, (), True, context, "cpu", "int16")
        runner = Runner(self.model, self.memory, seats, context, VOCAB)
        replica = Replica(self.scheduler, self.ledger)
        self.engine = Engine(card, [replica], InProcessExecutor(runner, self.memory), depth)
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.compared: Counter[Residence] = Counter()  # number of compared host rows, by residence

    def add(self, name: str, prompt: int, answer: int, tiers: TiersChoice = "auto") -> Request:
        spec = PromptSpec(tuple(prompt_of(name, prompt)), SamplingParams(temperature=0, seed=0))
        request = Request(name, spec, prompt + answer, tiers)
        self.scheduler.add(request)
        self.requests[name], self.answers[name] = request, []
        return request

    def step(self) -> TokenOutputs:
        outputs = self.engine.step()
        self.engine.audit()
        for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            assert name not in self.reasons, f"{name} got a token after its end"
            self.answers[name].append(token)
        for name, reason in outputs.finished.items():
            assert name not in self.reasons, f"{name} ended twice"
            self.reasons[name] = reason
        if not self.settled:
            return outputs
        self.compare_host()
        self.poison_free_pages()
        return outputs

    @property
    def settled(self) -> bool:
        """True if no command is pending for the next plan."""
        return not self.scheduler._next_plan.commands

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Steps until the condition holds or the engine is idle."""
        for _ in range(4000):
            if (until() if until is not None else self.engine.idle) or self.engine.idle:
                return
            self.step()
        raise AssertionError("the engine makes no progress")

    def finish(self) -> None:
        """Runs every request to its end, and checks that all answers are right and no page is held."""
        self.run()
        for name, request in self.requests.items():
            expected = alone(*self._prompt_and_answer(request)).tokens[len(request.prompt) :]
            if self.reasons[name] == "abort":
                expected = expected[: len(self.answers[name])]
            assert self.answers[name] == expected, f"{name} got other tokens than the plain decoder computes"
        self.assert_empty()

    def assert_empty(self) -> None:
        assert self.ledger.device.held == 0, f"{self.ledger.device.held} device pages were not released"
        assert self.ledger.host is not None
        assert self.ledger.host.held == 0, f"{self.ledger.host.held} host pages were not released"

    def compare_host(self) -> None:
        """Checks that the host has all full pages, all rows of streamed prompts, and all data of parked requests."""
        page_rows = self.geometry.page_rows
        for name, request in self.requests.items():
            residence = request.holding.residence
            if residence is Residence.ABSENT or name in self.reasons:
                continue
            known = min(request.num_scheduled, len(request.tokens))  # the tokens of plans in flight are not known yet
            full = min(known, request.num_scheduled // page_rows * page_rows)
            rows = known if residence in (Residence.STREAMED, Residence.PARKED) else full
            keys = known if residence is Residence.PARKED else full
            pages = request.holding.pages[PageUse.HOST]
            assert len(pages) >= self.geometry.row_pages(known), f"{name}, {residence}: too few host pages are held"
            host_rows = torch.tensor([pages[p // page_rows] * page_rows + p % page_rows for p in range(known)]).long()
            row_bytes, key_bytes = stored_alone(*self._prompt_and_answer(request))
            on_host = as_bytes(self.host.rows[:, host_rows[:rows]])
            assert torch.equal(on_host, row_bytes[:, :rows]), f"{name}, {residence}: rows differ"
            assert self.host.keys is not None
            on_host = as_bytes(self.host.keys[:, host_rows[:keys]])
            assert torch.equal(on_host, key_bytes[:, :keys]), f"{name}, {residence}: keys differ"
            self.compared[residence] += rows

    def _following(self, name: str, tokens: Sequence[int]) -> int:
        """Returns the token after `tokens` in the context of a request. After a wrong token, it is any token."""
        return alone(*self._prompt_and_answer(self.requests[name])).tokens[len(tokens)]

    @staticmethod
    def _prompt_and_answer(request: Request) -> tuple[tuple[int, ...], int]:
        """Returns the prompt, and the length of the answer."""
        return request.prompt.token_ids, request.max_length - len(request.prompt)

    def poison_free_pages(self) -> None:
        holdings = [request.holding for request in self.requests.values()]
        on_host = {page for holding in holdings for page in holding.pages[PageUse.HOST]}
        on_device = {
            page for h in holdings for use, pages in h.pages.items() if use is not PageUse.HOST for page in pages
        }
        free_on_host = set(range(self.host.rows.shape[1] // self.geometry.page_rows)) - on_host
        self.poisoner.poison(sorted(set(range(self.pool.pages)) - on_device), sorted(free_on_host))
