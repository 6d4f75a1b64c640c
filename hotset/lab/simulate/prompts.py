"""The requests of a trace. Prompts consist of blocks. Blocks with equal ids have equal tokens, so that the prefix cache
finds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.input_processor import Choice
from hotset.lab.bench.workload import TRACE_BLOCK_TOKENS, TraceEntry
from hotset.schedule.request import Request

FIRST_TOKEN_ID = 16  # lower ids may be special tokens


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the traffic."""

    seconds: float
    prompt: tuple[int, ...]
    answer_tokens: int
    block_ids: tuple[int, ...] = ()  # the blocks with which the prompt begins, if it consists of blocks
    block_tokens: int = TRACE_BLOCK_TOKENS


def arrivals(entries: Sequence[TraceEntry], scale: float, vocab: int) -> list[Arrival]:
    """Returns the requests of a trace. Prompts without blocks are random.

    The first two tokens of a block encode its id. Its other tokens are the same in all blocks.
    """
    block_tokens, ids = max(1, round(TRACE_BLOCK_TOKENS * scale)), vocab - FIRST_TOKEN_ID
    generator = Random(0)
    rest = [FIRST_TOKEN_ID + position % ids for position in range(block_tokens)][2:]
    found = []
    for entry in entries:
        tokens: list[int] = []
        for block_id in entry.block_ids:
            tokens += (FIRST_TOKEN_ID + block_id % ids, FIRST_TOKEN_ID + block_id // ids % ids)[:block_tokens]
            tokens += rest
        missing = entry.input_tokens - len(tokens)
        if missing > 0:
            tokens += generator.choices(range(FIRST_TOKEN_ID, vocab), k=missing)
        del tokens[entry.input_tokens :]
        found.append(Arrival(entry.offset, tuple(tokens), entry.output_tokens, entry.block_ids, block_tokens))
    return found


def choice_of(number: int, request: Arrival, hashed_page_rows: int | None) -> Choice:
    """Returns the choice of a request, whose id is `number`. If `hashed_page_rows` is given, the choice has the hashes
    of the prompt's pages of this size."""
    params = SamplingParams(temperature=0, max_tokens=request.answer_tokens, ignore_eos=True, seed=0)
    prompt, length = PromptSpec(request.prompt, params), len(request.prompt) + request.answer_tokens
    if hashed_page_rows is None:
        return Choice(str(number), 0, prompt, length)
    return _HashedChoice(str(number), 0, prompt, length, page_hashes=page_hashes(request, hashed_page_rows))


@dataclass(frozen=True, slots=True)
class _HashedChoice(Choice):
    """A choice with the hashes of its prompt's first pages."""

    page_hashes: Sequence[bytes] = ()

    def to_request(self) -> Request:
        request = Choice.to_request(self)
        request.page_hashes = list(self.page_hashes)
        return request


def page_hashes(request: Arrival, page_rows: int) -> list[bytes]:
    """Returns hashes of the full pages of a prompt. They are equal if the tokens up to the end of the page are equal.

    They are computed from block ids, in a tenth of the time that `PageHasher` takes for the tokens. The list is empty
    if a page can be in two blocks.
    """
    if request.block_tokens % page_rows:
        return []
    numbers = [number.to_bytes(2, "little") for number in range(request.block_tokens // page_rows)]
    block_hash, hashes = b"", []
    for block_id in request.block_ids:
        block_hash = sha256(b"%b %d" % (block_hash, block_id)).digest()
        hashes += [block_hash + number for number in numbers]
    return hashes[: len(request.prompt) // page_rows]
