"""The output processor assigns finish reasons to the right delta."""

from hotset.base.sampling import PromptSpec, SamplingParams
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
