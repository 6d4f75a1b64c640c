"""Measures how many drafts of the demo model's MTP layer are accepted, and that answers are those without drafts.

    python benchmarks/accepted_length.py [--device cuda] [--json accepted.json]

The accepted length is the mean number of tokens that a step adds to an answer, without the first token of each
answer: 1 without drafts, at most 1 + --speculate. Requests run one at a time. Tokens after the end of an answer do not
count, so an answer of three tokens has an accepted length of at most 2. Bars: at least 2.2 on retrieval answers, 1.8 on
greedy continuations of running text, and the same answers as without drafts. Sampled continuations are reported. With
--accept distribution, they differ from those without drafts, and only greedy answers must be the same.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import Bar, make_parser, report

from hotset import LLM, SamplingParams
from hotset.lab.evaluate.tasks import TASKS, filler, make_questions

MODEL = str(Path(__file__).resolve().parents[1] / "models" / "demo-dsa")
TEXT_TOKENS, CONTINUED_TOKENS = 256, 64
MAX_ANSWER = 64
WORDS_APART = 3001  # between the beginnings of two texts
BARS = {"retrieval answers": 2.2, "running text, greedy": 1.8}


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Accepted:
    load: str
    requests: int
    tokens: int  # of all answers
    drafted: int
    accepted: int
    length: float  # accepted length
    same_answers: int


def loads(llm: LLM, questions: int, texts: int, length: int) -> list[Load]:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    bos = tokenizer.encode("<|bos|>")
    asked = make_questions(list(TASKS), length, questions, 5, lambda text: len(bos + tokenizer.encode(text)))
    words = filler()
    starts = [(number * WORDS_APART) % (len(words) - TEXT_TOKENS) for number in range(texts)]
    running = [tokenizer.encode("".join(words[start : start + TEXT_TOKENS])) for start in starts]
    texts_ids = [[*bos, *ids[: TEXT_TOKENS - 1]] for ids in running]
    continued = {"max_tokens": CONTINUED_TOKENS, "ignore_eos": True}
    return [
        Load(
            "retrieval answers",
            [[*bos, *tokenizer.encode(question.prompt)] for question in asked],
            SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER),
        ),
        Load("running text, greedy", texts_ids, SamplingParams(temperature=0.0, **continued)),
        *(
            Load(f"running text, temperature {t}", texts_ids, SamplingParams(temperature=t, seed=1, **continued))
            for t in (0.7, 1.0)
        ),
    ]


def answers(llm: LLM, load: Load) -> list[tuple[int, ...]]:
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in load.prompts], load.params)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def measure(plain: LLM, drafting: LLM, load: Load) -> Accepted:
    before = drafting.stats()
    drafted = answers(drafting, load)
    after = drafting.stats()
    expected = answers(plain, load)
    verified = sum(after.drafts_verified.values()) - sum(before.drafts_verified.values())
    accepted = sum(after.drafts_accepted.values()) - sum(before.drafts_accepted.values())
    tokens = after.tokens_generated - before.tokens_generated
    decode_steps = after.steps - before.steps - len(drafted)  # the step of a prompt samples the first token
    same = sum(one == other for one, other in zip(drafted, expected, strict=True))
    length = (tokens - len(drafted)) / max(1, decode_steps)
    return Accepted(load.name, len(drafted), tokens, verified, accepted, length, same)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--speculate", type=int, default=3)
    parser.add_argument("--accept", default="exact", choices=["exact", "distribution"], help="see `hotset serve`")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a retrieval prompt")
    options = parser.parse_args()
    settings: dict[str, Any] = {"device": options.device, "max_num_seqs": 1, "max_model_len": 4096}
    settings["plans_in_flight"] = 1  # no step follows the end of an answer
    questions, texts = (12, 6) if options.quick else (48, 24)
    plain = LLM(MODEL, **settings, speculate=0)
    drafting = LLM(MODEL, **settings, speculate=options.speculate, accept=options.accept)
    rows = [measure(plain, drafting, load) for load in loads(plain, questions, texts, options.length)]
    for llm in (plain, drafting):
        llm.close()
    report(
        f"{options.speculate} drafts of the MTP layer, --accept {options.accept}",
        [asdict(row) for row in rows],
        options.json,
    )
    bars = [Bar(row.load, row.length, BARS[row.load], at_least=True) for row in rows if row.load in BARS]
    exact = [row for row in rows if options.accept == "exact" or row.load in BARS]  # the others may differ
    bars += [Bar(f"{row.load}: answers that differ", row.requests - row.same_answers, 0) for row in exact]
    report("Bars", [bar.row() for bar in bars], None)
    sys.exit(not all(bar.met for bar in bars))


if __name__ == "__main__":
    main()
