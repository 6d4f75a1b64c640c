"""The loads of `prefix.py` on an engine in this process: conversations and single requests."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hotset.base.request_options import RequestOptions, TiersChoice
from hotset.base.sampling import SamplingParams
from hotset.engine.core import Engine
from hotset.engine.input_processor import InputProcessor

Clock = Callable[[], float]  # returns seconds

FIRST_ID = 16  # lower token ids may be special
NEAR_TIE = 0.01  # two tokens whose log-probabilities differ by less are nearly equally likely


def random_tokens(random: Random, count: int, vocab: int) -> list[int]:
    return [random.randrange(FIRST_ID, vocab) for _ in range(count)]


@dataclass(slots=True)
class Answer:
    """One request and its answer."""

    prompt: Sequence[int]
    sent_s: float
    first_s: float = 0.0  # when its first token was sampled
    ended_s: float = 0.0
    cached: int = 0  # tokens of the prompt that were in the prefix cache
    token_ids: list[int] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        """The time to the first token."""
        return self.first_s - self.sent_s


class Client:
    """Sends greedy requests to an engine, which runs in the same thread, and times their tokens."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        self._input_processor = InputProcessor(engine.card, seed=0)
        self._numbers = itertools.count()
        self._open: dict[str, Answer] = {}

    def send(self, prompt: Sequence[int], answer_tokens: int, tiers: TiersChoice = "auto") -> Answer:
        """Adds a request. Its answer has `answer_tokens` tokens, whatever they are, and grows with every step."""
        answer = Answer(prompt, self.clock())
        params = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True)
        (choice,) = self._input_processor.accept(str(next(self._numbers)), prompt, params, RequestOptions(tiers))
        self._open[choice.request_id] = answer
        self.engine.add(choice)
        return answer

    def step(self) -> list[Answer]:
        """Runs one step. Returns the answers that it completed."""
        outputs = self.engine.step()
        now = self.clock()
        for request_id, cached in outputs.cached_tokens.items():
            self._open[request_id].cached = cached
        for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            answer = self._open[request_id]
            answer.first_s = answer.first_s if answer.token_ids else now
            answer.token_ids.append(token)
        ended = [self._open.pop(request_id) for request_id in outputs.finished]
        for answer in ended:
            answer.ended_s = now
        return ended

    def answer(self, prompts: Sequence[Sequence[int]], answer_tokens: int, tiers: TiersChoice = "auto") -> list[Answer]:
        """Sends all prompts at once and steps until all have their answers."""
        answers = [self.send(prompt, answer_tokens, tiers) for prompt in prompts]
        while self._open:
            self.step()
        while not self.engine.idle:
            self.engine.step()
        return answers

    def gap(self, prompt: Sequence[int], likely: int, other: int) -> float:
        """Returns by how much the log-probability of token `likely` exceeds that of token `other` after a prompt."""
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=20)
        (choice,) = self._input_processor.accept(str(next(self._numbers)), prompt, params)
        self.engine.add(choice)
        alternatives: dict[int, tuple[float, int]] = {}
        while not self.engine.idle:
            for of_token in self.engine.step().alternatives.values():
                alternatives = dict(of_token)
        least = min(logprob for logprob, _ in alternatives.values())
        return abs(alternatives[likely][0] - alternatives.get(other, (least, 0))[0])


@dataclass(frozen=True, slots=True)
class Script:
    """The messages of the users in several conversations, which begin with the same system prompt."""

    system: list[int]
    messages: list[list[list[int]]]  # [conversation][turn]

    @staticmethod
    def make(conversations: int, turns: int, system: int, message: int, vocab: int, seed: int) -> "Script":
        random = Random(seed)
        return Script(
            random_tokens(random, system, vocab),
            [[random_tokens(random, message, vocab) for _ in range(turns)] for _ in range(conversations)],
        )


@dataclass(frozen=True, slots=True)
class Conversations:
    """The answers of all turns of all conversations."""

    seconds: float
    answers: list[list[Answer]]  # [conversation][turn]

    @property
    def all(self) -> list[Answer]:
        return [answer for answers in self.answers for answer in answers]

    @property
    def later(self) -> list[Answer]:
        """The answers from the second turn on."""
        return [answer for answers in self.answers for answer in answers[1:]]

    def row(self) -> dict[str, Any]:
        first, later = [answers[0].ttft_s for answers in self.answers], sorted(answer.ttft_s for answer in self.later)
        prompts = sum(len(answer.prompt) for answer in self.all)
        return {
            "seconds": self.seconds,
            "answer tokens/s": sum(len(answer.token_ids) for answer in self.all) / self.seconds,
            "prompt tokens": prompts,
            "reused": sum(answer.cached for answer in self.all) / prompts,
            "ttft of turn 1, mean s": statistics.mean(first),
            "ttft of later turns, mean s": statistics.mean(later),
            "p50 s": statistics.median(later),
            "p99 s": later[int(len(later) * 0.99)],
        }


def converse(
    client: Client, script: Script, answer_tokens: int, histories: Conversations | None = None
) -> Conversations:
    """Runs all conversations at the same time. Each sends its next turn when the answer to the last one is complete.

    A prompt consists of the system prompt, all earlier messages and answers, and the next message. If `histories` is
    given, the earlier answers are taken from there, so that all runs have the same prompts.
    """
    done: list[list[Answer]] = [[] for _ in script.messages]
    open_turns: dict[int, int] = {}  # id of the answer -> conversation

    def send(conversation: int) -> None:
        earlier = (histories.answers if histories else done)[conversation]
        messages, turn = script.messages[conversation], len(done[conversation])
        prompt = list(script.system)
        for message, answer in zip(messages[:turn], earlier, strict=False):
            prompt += message + answer.token_ids
        sent = client.send(prompt + messages[turn], answer_tokens)
        open_turns[id(sent)] = conversation

    start = client.clock()
    for conversation in range(len(script.messages)):
        send(conversation)
    while open_turns:
        for answer in client.step():
            conversation = open_turns.pop(id(answer))
            done[conversation].append(answer)
            if len(done[conversation]) < len(script.messages[conversation]):
                send(conversation)
    return Conversations(client.clock() - start, done)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the answers of two runs with the same prompts differ."""

    compared: int
    different: int
    gaps: list[float]  # the difference of log-probabilities at the first different token of each answer

    @property
    def wrong(self) -> int:
        """The number of answers whose first different token is not nearly as likely as the expected one."""
        return sum(gap >= NEAR_TIE for gap in self.gaps)


def compare(expected: Conversations, measured: Conversations, judge: Client) -> Comparison:
    """Compares the tokens of all answers. `judge` computes the log-probabilities of different tokens."""
    pairs = list(zip(expected.all, measured.all, strict=True))
    assert all(left.prompt == right.prompt for left, right in pairs), "only answers to the same prompts can be compared"
    different = [(left, right) for left, right in pairs if left.token_ids != right.token_ids]
    gaps = []
    for left, right in different:
        tokens = list(zip(left.token_ids, right.token_ids, strict=True))
        first = next(number for number, (one, other) in enumerate(tokens) if one != other)
        gaps.append(judge.gap([*left.prompt, *left.token_ids[:first]], *tokens[first]))
    return Comparison(len(pairs), len(different), gaps)
