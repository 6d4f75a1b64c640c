"""Drafts tokens in a worker: runs the MTP layer at the end of each step, with CUDA graphs or without."""

from collections.abc import Callable

import torch
from torch import Tensor

from hotset.engine.decode_graphs import DecodeGraphs, StepGraph
from hotset.engine.drafts.mtp import DraftedTokens, DrawDrafts, MtpDrafts, MtpModel, rows_of
from hotset.engine.drafts.mtp_graphs import MtpGraphs
from hotset.engine.drafts.segments import SampledSegments, SeatDrafts
from hotset.kernels.device_copies import list_to_device
from hotset.memory.resident import ResidentView
from hotset.models.collectives import Collectives
from hotset.schedule.plan import DRAFTED, Plan
from hotset.tiers.kv_memory import KvMemory
from hotset.tiers.residence import Residence


class WorkerDrafts:
    """Runs the MTP layer for the steps of plans. All work is queued on the current stream."""

    def __init__(
        self,
        model: MtpModel,
        memory: KvMemory,
        tokens: Tensor,
        max_drafts: int,
        collectives: Collectives,
        draw: DrawDrafts | None,
    ) -> None:
        """For `tokens`, `max_drafts` and `draw` see `MtpDrafts`. `collectives` connect the ranks that compute the same
        tokens."""
        self._memory, self._collectives = memory, collectives
        self._mtp = MtpDrafts(model, memory, tokens, max_drafts, draw)
        self._graphs: MtpGraphs | None = None

    @property
    def seat_drafts(self) -> SeatDrafts:
        return self._mtp.seat_drafts

    def use_graphs(self, steps: DecodeGraphs, seats: int) -> None:
        """Makes graphs draft after steps that the graphs `steps` compute. `capture_all` captures the new graphs."""
        self._graphs = MtpGraphs(self._mtp, steps, self._memory, seats)

    def capture_all(self, progress: Callable[[int, int], None]) -> None:
        """Captures all graphs, if there are any. `progress(done, total)` counts them."""
        if self._graphs is not None:
            self._graphs.capture_all(progress)

    def before_replay(self, graph: StepGraph) -> None:
        """Captures what follows a step that `graph` computes, if that does not exist yet."""
        if self._graphs is not None:
            self._graphs.capture_rows(graph)

    def segments_of(self, plan: Plan) -> SampledSegments | None:
        """Returns the sampled segments of a plan, or None if it has no drafts and nothing is drafted after it."""
        if plan.sampled and (plan.num_drafts or plan.drafts or plan.unverified):
            return SampledSegments(plan, self._mtp.seat_drafts)
        return None

    def after_step(
        self,
        plan: Plan,
        graph: StepGraph | None,
        hidden: Tensor | None,
        view: Callable[[], ResidentView],
        segments: SampledSegments | None,
        sampled_ids: Tensor | None,
    ) -> DraftedTokens | None:
        """Writes the rows of the MTP layer, mirrors the pages that are full with them, and drafts tokens.

        `graph` is the graph that has computed the step. If it is None, `view` returns the view that the step used.
        `hidden` is what the model returned, and `sampled_ids` are the tokens that were sampled from it.
        """
        if graph is not None and self._graphs is not None:
            output = self._graphs.write_rows(graph)
        else:
            assert hidden is not None, "the step kept no hidden states"
            output = self._mtp.write_rows(view(), hidden)
        self._memory.mirror_filled_pages(plan.seats, plan.starts, plan.max_counts)
        if segments is None or sampled_ids is None:
            return None
        drafts, has_tiered = plan.num_drafts > 0 and any(plan.draft_limits), Residence.TIERED in plan.residences
        if not (drafts or plan.drafts or plan.unverified):
            return None
        if drafts and (sampled_tokens := plan.sampled_tokens) is not None:
            output = rows_of(output, list_to_device(sampled_tokens, torch.int64, sampled_ids.device))
        if drafts and self._graphs is not None:
            columns = self._graphs.draft(segments, sampled_ids, output, plan.num_drafts, has_tiered=has_tiered)
        else:
            columns = self._mtp.draft(segments.on_device, sampled_ids, output if drafts else None)
        if drafts and self._collectives.size > 1:  # ranks must not diverge
            columns = self._collectives.broadcast(columns.contiguous())
            segments.on_device.keep_drafts(columns[:, 1:])
        return DraftedTokens(segments.segments, plan.drafts, columns)


def planned_drafts(plan: Plan) -> list[tuple[int, int, int]]:
    """Returns seat, position and token of each draft of a plan, except drafts that only the worker knows."""
    columns: list[tuple[int, int, int]] = []
    for segment, drafts in plan.drafts.items():
        if DRAFTED not in drafts:
            end = plan.starts[segment] + plan.counts[segment]
            positions = range(end - len(drafts), end)
            columns += [(plan.seats[segment], *token) for token in zip(positions, drafts, strict=True)]
    return columns
