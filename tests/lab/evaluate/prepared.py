"""Questions whose contexts were prefilled once by the demo model. Tests answer them over intact or damaged memory."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hotset.lab.evaluate.tasks import Question
from hotset.memory.device_pool import DevicePool
from hotset.memory.resident import ResidentView, make_batch
from hotset.memory.tables import PageTables
from hotset.memory.view import Selected, View, ViewWrapper
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import open_weights
from hotset.models.decoder import Decoder
from hotset.models.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo-dsa"
CPU = torch.device("cpu")
PAGE_ROWS = 64
ANSWER_TOKENS = 16
QUESTION = re.compile(r" (?:recall|list) (?P<key>\S+ [^\s;]+)(?: and \S+ [^\s;]+)*;?$")  # the question, at the very end
QUESTION_TOKENS = 12  # last tokens of each prompt, prefilled over the damaged memory: they contain the question
CHUNK = 1024

Damage = Callable[[Tensor, View], Tensor]  # positions that the indexer chose -> positions whose rows are read


class DamagedView(ViewWrapper):
    """Replaces the selected positions by those that `damage` returns."""

    def __init__(self, inner: View, damage: Damage) -> None:
        super().__init__(inner)
        self._damage = damage

    def select(self, layer: int, positions: Tensor) -> Selected:
        return super().select(layer, self._damage(positions, self._inner))


def no_damage(positions: Tensor, view: View) -> Tensor:
    return positions


@dataclass(frozen=True)
class Prepared:
    """The contexts' rows and index keys are in `pool`; question i has seat i."""

    questions: Sequence[Question]
    prompts: Sequence[Sequence[int]]
    model: Decoder
    tokenizer: Tokenizer
    pool: DevicePool
    tables: PageTables

    @cached_property
    def undamaged(self) -> float:
        """The accuracy when every row is right, computed once for all tests that compare with it."""
        return self.accuracy()

    def accuracy(self, damage: Damage = no_damage) -> float:
        """Prefills the ends of the prompts and answers all questions in one batch, through views with this damage."""
        starts = [len(prompt) - QUESTION_TOKENS for prompt in self.prompts]
        tokens = [list(prompt[-QUESTION_TOKENS:]) for prompt in self.prompts]
        answers: list[list[int]] = [[] for _ in self.prompts]
        (end,) = self.tokenizer.encode("<|end|>")
        while len(answers[0]) < ANSWER_TOKENS and not all(end in answer for answer in answers):
            view = ResidentView(
                self.pool, self.tables, make_batch(range(len(starts)), starts, [len(new) for new in tokens], CPU)
            )
            flat = torch.tensor([token for new in tokens for token in new])
            last_tokens = torch.cumsum(torch.tensor([len(new) for new in tokens]), 0) - 1
            hidden = self.model.forward(flat, DamagedView(view, damage))
            chosen = self.model.logits(hidden, last_tokens).argmax(-1).tolist()
            starts = [start + len(new) for start, new in zip(starts, tokens, strict=True)]
            tokens = [[token] for token in chosen]
            for answer, token in zip(answers, chosen, strict=True):
                answer.append(token)
        right = [self._text(a, end) == q.answer.strip() for a, q in zip(answers, self.questions, strict=True)]
        return sum(right) / len(right)

    def _text(self, tokens: list[int], end: int) -> str:
        return self.tokenizer.decode(tokens[: tokens.index(end)] if end in tokens else tokens).strip()

    def needle_page(self, nth: int) -> int:
        """Returns the page of question `nth`'s context that holds the value of the question's first key."""
        prompt = self.questions[nth].prompt
        question = QUESTION.search(prompt)
        assert question is not None, prompt[-80:]
        record = f" note {question['key']}"
        position = 1 + len(self.tokenizer.encode(prompt[: prompt.rindex(record) + len(record)]))
        return position // PAGE_ROWS

    @contextmanager
    def shifted(self, kind: Literal["rows", "keys"]) -> Iterator[None]:
        """Rotates every needle's page of rows, or of index keys, by one position until the `with` block ends."""
        before = self.pool.bytes.clone()
        for seat in range(len(self.questions)):
            positions = torch.arange(PAGE_ROWS) + self.needle_page(seat) * PAGE_ROWS
            shifted = positions.roll(-1)
            if kind == "rows":
                source, target = (self.tables.rows_at(torch.tensor(seat), p) for p in (positions, shifted))
                self.pool.rows[:, target] = self.pool.rows[:, source]
            else:
                view = ResidentView(self.pool, self.tables, make_batch([seat], [0], [1], CPU))
                for group in range(self.pool.shape.groups):
                    keys = view.keys(group)
                    source, target = (keys.locations(seat, p) for p in (positions, shifted))
                    keys.blocks[target] = keys.blocks[source].clone()
        yield
        self.pool.bytes.copy_(before)


def load() -> tuple[Decoder, Tokenizer]:
    files = find_model(str(DEMO))
    weights = open_weights(files, torch.float32, CPU, load_format="auto", progress=None)
    tokenizer = Tokenizer.load(files, None)
    assert tokenizer is not None
    return Decoder(files.spec, weights), tokenizer


def prepare(model: Decoder, tokenizer: Tokenizer, questions: Sequence[Question]) -> Prepared:
    """Prefills every prompt except its last QUESTION_TOKENS tokens, in chunks."""
    prompts = [tokenizer.encode("<|bos|>" + question.prompt) for question in questions]
    geometry = model.kv_shape.geometry(PAGE_ROWS)
    longest = max(map(len, prompts)) + ANSWER_TOKENS
    row_pages, num_pages = geometry.row_pages(longest), geometry.resident_pages(longest)
    pool = DevicePool(model.kv_shape, geometry, num_pages * len(prompts), CPU)
    tables = PageTables(len(prompts), longest, geometry, CPU)
    for seat, prompt in enumerate(prompts):
        pages = range(seat * num_pages, (seat + 1) * num_pages)
        tables.extend_rows(seat, 0, pages[:row_pages])
        tables.extend_keys(seat, 0, pages[row_pages:])
        for first in range(0, len(prompt) - QUESTION_TOKENS, CHUNK):
            chunk = prompt[first : min(first + CHUNK, len(prompt) - QUESTION_TOKENS)]
            view = ResidentView(pool, tables, make_batch([seat], [first], [len(chunk)], CPU))
            model.forward(torch.tensor(chunk), view)
    return Prepared(questions, prompts, model, tokenizer, pool, tables)
