"""Choices take in the engine's news."""

from hotset.base.sampling import PromptSpec, SamplingParams
from hotset.engine.input_processor import Choice
from hotset.engine.output_processor import OutputProcessor
from hotset.schedule.plan import TokenOutputs


def test_an_end_belongs_to_the_last_token_of_a_request_that_has_two() -> None:
    """The first came with a landing, the second by a step that was committed before anybody asked for news."""
    choices = OutputProcessor(None)
    choices.add([Choice("r/0", 0, PromptSpec((5, 6), SamplingParams(max_tokens=2)), 4)])
    news = TokenOutputs(request_ids=["r/0", "r/0"], token_ids=[7, 8], finished={"r/0": "length"})
    deltas, stopped = choices.process(news)
    assert [(delta.token_ids, delta.finish_reason) for _, delta in deltas] == [((7,), None), ((8,), "length")]
    assert stopped == [] and len(choices) == 0
