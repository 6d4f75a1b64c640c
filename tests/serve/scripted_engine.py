"""An engine that plays back answers, and a tokenizer for it."""

import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from byte_level import byte_level
from harness import tiny_directory

from hotset.base.sampling import SamplingParams
from hotset.engine.input_processor import InputProcessor, ModelCard
from hotset.engine.output_processor import OutputProcessor
from hotset.engine.outputs import Delta
from hotset.grammar.check import StructureChecks
from hotset.models.checkpoint.files import find_model
from hotset.models.tokenizer import ChatSettings, Tokenizer
from hotset.schedule.plan import TokenOutputs


def byte_tokenizer(directory: Path, template: str, special: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer of the 256 bytes, BOS, an end token, and these special tokens. The caller closes it."""
    backend = byte_level()
    backend.add_special_tokens(["<bos>", "<end>", *special])
    backend.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<end>", "add_bos_token": True, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(find_model(tiny_directory(directory)), None, ChatSettings())
    assert tokenizer is not None
    return tokenizer


class ScriptedClient:
    """An engine client that answers every request with the next tokens of a script, and records the prompts."""

    role, control, waiting, newest_stats, defaults = "both", None, 0, None, {}

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.state_observers: list[Any] = []
        (end,) = tokenizer.encode("<end>", add_special=False)
        self.model = ModelCard("scripted", "llama", 4096, 512, (end,), True, 4096, "cpu", "float32")
        self.structure_checks = StructureChecks(tokenizer.jobs, tokenizer.to_json, 512)
        self.answers: list[list[int]] = []  # the tokens of each choice
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []

    def say(self, *answers: str) -> None:
        self.answers = [self.tokenizer.encode(answer, add_special=False) for answer in answers]

    def check(self) -> None: ...

    async def generate(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, *_: Any
    ) -> AsyncGenerator[Delta, None]:
        self.prompts.append(list(prompt))
        self.params.append(params)
        choices = InputProcessor(self.model, seed=0).accept(request_id, prompt, params)
        outputs = OutputProcessor(self.tokenizer)
        outputs.add(choices)
        for position in range(max(map(len, self.answers))):
            for choice, answer in zip(choices, self.answers, strict=True):
                if position >= len(answer):
                    continue
                token = answer[position]
                step = TokenOutputs()
                step.add(choice.request_id, token, None if params.logprobs is None else {token: (-0.5, 1)})
                if token in self.model.eos_ids:
                    step.finished[choice.request_id] = "stop"
                elif position + 1 == len(answer):
                    step.finished[choice.request_id] = "length"
                for _, delta in outputs.process(step)[0]:
                    yield delta
