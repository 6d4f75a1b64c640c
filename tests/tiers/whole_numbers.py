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

from hotset.base.config import EngineConfig, TiersMode
from hotset.base.request_options import RequestOptions, TiersChoice
from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.core import Engine
from hotset.engine.drafts.settings import DraftSettings
from hotset.engine.drafts.speculation import Speculation
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
from hotset.models.mtp import MtpOutput
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
MTP = LAYERS  # the number of the MTP layer, which has an indexer, too
ROW, KEY = RowLayout(ROW_WIDTH, torch.int16), RowLayout(KEY_WIDTH, torch.int16, align=4)
SHAPE = KvShape(LAYERS, ROW, INDEXED, KEY, TOPK)
Computed = dict[tuple[int, int], int]  # (seat, position) -> token
SHAPE_WITH_MTP = KvShape(LAYERS + 1, ROW, (*INDEXED, MTP), KEY, TOPK)


class IntegerModel:
    """A `RunnerModel` that computes in integers. It records the selections of each segment's tokens."""

    device = CPU
    dtype = torch.int64
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
        selected.wait()
        rows = selected.layout.decode(selected.rows[selected.row_ids.clamp_min(0)], torch.int64)
        read = ((rows + (1 << 15)) * torch.arange(1, ROW_WIDTH + 1)).sum(-1)
        terms = torch.where(selected.row_ids == EMPTY, 0, _mix(read, positions + 1))
        return _mix(hidden, terms.sum(-1) % PRIME)


class DraftingModel(IntegerModel):
    """An `IntegerModel` with an MTP layer, whose drafts are imposed: they do not depend on what the layer computes.

    The output of the layer is compared with `expected(seat, position, computed)`. The latter returns None if a token up
    to the next one is wrong. `computed` are the tokens of the step by seat and position, before any were sampled.
    """

    kv_shape = SHAPE_WITH_MTP

    def __init__(self, expected: Callable[[int, int, Computed], int | None], draft: Callable[[int, int], int]) -> None:
        """`draft(seat, position)` returns a draft of the token at this position."""
        super().__init__()
        self._expected, self._draft = expected, draft
        self._computed: Computed = {}
        self.compared = 0

    def forward(self, token_ids: Tensor, view: View) -> Tensor:
        places = zip(view.seat_of.tolist(), view.segments.positions.tolist(), strict=True)
        self._computed = dict(zip(places, token_ids.tolist(), strict=True))
        return super().forward(token_ids, view)

    def mtp_input(self, x: Tensor) -> Tensor:
        return x

    def run_mtp(self, token_ids: Tensor, hidden: Tensor, view: View, selected: Tensor | None = None) -> MtpOutput:
        x = _mix(hidden, token_ids + 1)
        view.new_rows(MTP).store(_spread(x, MTP, ROW_WIDTH, 1 << 16).short())
        view.keys(len(INDEXED)).store(view.segments.positions, _spread(x, 100 + MTP, KEY_WIDTH, 7).short())
        positions = self._choose(view, len(INDEXED), _spread(x, 200 + MTP, KEY_WIDTH, 7))
        output = self._attend(view, MTP, positions, x)
        tokens = [*zip(view.seat_of.tolist(), view.segments.positions.tolist(), strict=True)]
        for token, computed in zip(tokens, output.tolist(), strict=True):
            expected = self._expected(*token, self._computed) if selected is None else None
            assert expected is None or computed == expected, f"the MTP layer attended to other rows at {token}"
            self.compared += expected is not None
        drafts = torch.tensor([self._draft(seat, position + 2) for seat, position in tokens])
        return MtpOutput(output, drafts, positions)

    def mtp_logits(self, normed: Tensor) -> Tensor:
        return F.one_hot(normed, VOCAB).float()


def _mix(a: Tensor, b: Tensor) -> Tensor:
    return (a * 48271 + b * 69621 + 12345) % PRIME


def _spread(hidden: Tensor, salt: int, width: int, values: int) -> Tensor:
    """Returns [tokens, width] pseudo-random integers around 0, each from a range of `values` integers."""
    return _mix(hidden[:, None], salt * 10 + torch.arange(width)) % values - values // 2


class PlainContext:
    """One context that is computed token by token in lists, with the arithmetic of `IntegerModel`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rows: list[list[list[int]]] = [[] for _ in range(LAYERS + 1)]
        self.keys: list[list[list[int]]] = [[] for _ in (*INDEXED, MTP)]
        self.mtp_outputs: list[int] = []
        self._hidden = 0  # of the newest token with rows
        self.ties = 0  # selections in which the last selected position and the best other position have equal scores

    def extend(self, token: int) -> int:
        """Appends a token and returns the token that follows it."""
        if self.tokens:
            self.end(token)
        hidden = self._mixed(token + 1, len(self.tokens) + 1)
        self.tokens.append(token)
        chosen: list[int] = []
        for layer in range(LAYERS):
            self.rows[layer].append(self._spread(hidden, layer, ROW_WIDTH, 1 << 16))
            if layer in INDEXED:
                keys = self.keys[INDEXED.index(layer)]
                keys.append(self._spread(hidden, 100 + layer, KEY_WIDTH, 7))
                chosen = self._choose(keys, self._spread(hidden, 200 + layer, KEY_WIDTH, 7))
            hidden = self._attend(layer, chosen, hidden)
        self._hidden = hidden
        return hidden % VOCAB

    def end(self, following: int) -> None:
        """Computes the MTP layer of the newest token, which is followed by this one."""
        x = self._mixed(self._hidden, following + 1)
        self.rows[MTP].append(self._spread(x, MTP, ROW_WIDTH, 1 << 16))
        self.keys[-1].append(self._spread(x, 100 + MTP, KEY_WIDTH, 7))
        chosen = self._choose(self.keys[-1], self._spread(x, 200 + MTP, KEY_WIDTH, 7))
        self.mtp_outputs.append(self._attend(MTP, chosen, x))

    def _attend(self, layer: int, chosen: list[int], hidden: int) -> int:
        total = 0
        for position in chosen:
            read = sum((value + (1 << 15)) * (j + 1) for j, value in enumerate(self.rows[layer][position]))
            total += self._mixed(read, position + 1)
        return self._mixed(hidden, total % PRIME)

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
    context.end(following)
    context.tokens.append(following)
    return context


@cache
def stored_alone(prompt: tuple[int, ...], answer: int) -> tuple[Tensor, Tensor]:
    """Returns the rows [layers, length, stride] and index keys [groups, length, stride] of `alone` as bytes. Those of
    the MTP layer are the last ones."""
    context = alone(prompt, answer)
    return _in_bytes(context.rows, ROW.stride_bytes), _in_bytes(context.keys, KEY.stride_bytes)


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
        mtp: bool = False,
    ) -> None:
        """If `max_drafts`, so many tokens are drafted for each request, of which the share `right_drafts` is right. If
        `mtp`, an MTP layer drafts, and up to `depth` plans in flight verify drafts of one request."""
        self.model = DraftingModel(self._mtp_output, self._draft) if mtp else IntegerModel()
        shape, unverified = self.model.kv_shape, (depth - 1) * max_drafts if mtp else 0
        self.geometry = replace(shape.geometry(page_rows, slots), max_drafts=max_drafts, max_unverified=unverified)
        self.ledger = Ledger(self.geometry, PageAllocator(device_pages), PrefixCache(host_pages))
        self.pool = DevicePool(shape, self.geometry, device_pages, CPU)
        self.host = HostStore(shape, host_pages, page_rows, CPU)
        self.poisoner = Poisoner(self.pool, self.host)
        self.memory = memory(self.pool, self.host, seats, context)
        self._random, self._right_drafts = Random(max_drafts), right_drafts
        self.drafter = ImposedDrafter(self._following, VOCAB, self._random, right_drafts)
        config = EngineConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=step_tokens,
            speculate=max_drafts,
            speculate_by="lookup" if max_drafts and not mtp else "mtp",
        )
        drafts, speculation = DraftSettings.of(config), None
        if max_drafts:
            speculation = Speculation(drafts, self.ledger, drafter=None if mtp else self.drafter)
        self.scheduler = Scheduler(self.ledger, seats, step_tokens, tiers, speculation=speculation)
        card = ModelCard("whole", "whole", context, VOCAB, (), True, context, "cpu", "int16")
        runner = Runner(self.model, self.memory, seats, context, VOCAB, drafts=drafts)
        self._tokens = runner._tokens
        self.engine = Engine(card, [self.scheduler], InProcessExecutor(runner), depth)
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.compared: Counter[Residence] = Counter()  # number of compared host rows, by residence

    def add(self, name: str, prompt: int, answer: int, tiers: TiersChoice = "auto") -> Request:
        spec = PromptSpec(tuple(prompt_of(name, prompt)), SamplingParams(temperature=0, seed=0))
        request = Request(name, spec, prompt + answer, RequestOptions(tiers))
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
            assert torch.equal(on_host, row_bytes[: len(on_host), :rows]), f"{name}, {residence}: rows differ"
            assert self.host.keys is not None
            on_host = as_bytes(self.host.keys[:, host_rows[:keys]])
            assert torch.equal(on_host, key_bytes[: len(on_host), :keys]), f"{name}, {residence}: keys differ"
            self.compared[residence] += rows

    def _following(self, name: str, tokens: Sequence[int]) -> int:
        """Returns the token after `tokens` in the context of a request. After a wrong token, it is any token."""
        return alone(*self._prompt_and_answer(self.requests[name])).tokens[len(tokens)]

    def _context_on(self, seat: int) -> PlainContext:
        """Returns the whole context of the request on a seat, when the plan that computes it is submitted."""
        (request,) = (request for request in self.requests.values() if request.seat == seat)
        return alone(*self._prompt_and_answer(request))

    def _mtp_output(self, seat: int, position: int, computed: Computed) -> int | None:
        """Returns what the MTP layer should compute at a position. None: some token up to the next one is wrong."""
        tokens, outputs = self._context_on(seat).tokens, self._context_on(seat).mtp_outputs
        if position + 1 >= len(tokens) or self._tokens[seat, : position + 2].tolist() != tokens[: position + 2]:
            return None
        is_right = all(computed.get((seat, p), tokens[p]) == tokens[p] for p in range(position + 1))
        return outputs[position] if is_right else None

    def _draft(self, seat: int, position: int) -> int:
        """Returns a draft of the token at a position, which is right or not at random."""
        context = self._context_on(seat)
        is_right = position < len(context.tokens) and self._random.random() < self._right_drafts
        return context.tokens[position] if is_right else self._random.randrange(VOCAB)

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
