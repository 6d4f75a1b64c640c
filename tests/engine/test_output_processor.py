"""The output processor assigns finish reasons and cached tokens to the right delta."""

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.core import _merge
from hotset.engine.input_processor import Choice
from hotset.engine.output_processor import OutputProcessor
from hotset.schedule.plan import TokenOutputs


def test_the_finish_reason_is_in_the_delta_of_the_last_of_two_tokens() -> None:
    """One `TokenOutputs` has two tokens of a request: the first came with the handoff, the second from the first decode
    step."""
    processor = OutputProcessor(None)
    processor.add([Choice("r/0", 0, PromptSpec((5, 6), SamplingParams(max_tokens=2)), 4)])
    outputs = TokenOutputs(request_ids=["r/0", "r/0"], token_ids=[7, 8], finished={"r/0": "length"})
    deltas, stopped = processor.process(outputs)
    assert [(delta.token_ids, delta.finish_reason) for _, delta in deltas] == [((7,), None), ((8,), "length")]
    assert stopped == [] and len(processor) == 0


def test_every_delta_has_the_cached_tokens_of_its_own_choice_from_whichever_replica() -> None:
    processor = OutputProcessor(None)
    processor.add([Choice(f"r/{n}", n, PromptSpec((5, 6, 7), SamplingParams(max_tokens=2)), 5) for n in range(3)])
    admitted = _merge([TokenOutputs(cached_tokens={"r/0": 2, "other": 9}), TokenOutputs(cached_tokens={"r/2": 1})])
    assert admitted, "outputs without a token would not be sent"
    assert processor.process(admitted) == ([], [])
    tokens = TokenOutputs(request_ids=["r/0", "r/1", "r/2"], token_ids=[7, 8, 9], finished={"r/1": "stop"})
    ended = TokenOutputs(finished={"r/0": "length", "r/2": "lost"})
    deltas = [*processor.process(tokens)[0], *processor.process(ended)[0]]
    assert [(delta.index, delta.cached_tokens) for _, delta in deltas] == [(0, 2), (1, 0), (2, 1), (0, 2), (2, 1)]
