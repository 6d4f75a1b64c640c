"""Log-probabilities of the model itself, for the rows that asked."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.models.sampling.draw import leading


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of the `m` batch rows that asked for them.

    Ranks start at 1 and are unique: ties are ranked by ascending id. A token that the model rules out has -inf.
    """

    wanted: Mapping[int, tuple[int, int]]  # batch row -> its row in the tensors, how many alternatives it asked for
    chosen_ids: Tensor  # [m] int64
    chosen_logprobs: Tensor  # [m]
    chosen_ranks: Tensor  # [m] int64
    top_ids: Tensor  # [m, most] int64, likeliest first
    top_logprobs: Tensor  # [m, most]

    def to_host(self) -> "LogprobRows":
        """The same rows in host memory. Waits for the device once, where `row` would wait at every call."""
        return LogprobRows(
            self.wanted,
            self.chosen_ids.cpu(),
            self.chosen_logprobs.cpu(),
            self.chosen_ranks.cpu(),
            self.top_ids.cpu(),
            self.top_logprobs.cpu(),
        )

    def row(self, batch_row: int) -> dict[int, tuple[float, int]] | None:
        """Token id -> (log-probability, rank): the chosen token first, then the likeliest ones; None: not asked."""
        if batch_row not in self.wanted:
            return None
        at, count = self.wanted[batch_row]
        found = {int(self.chosen_ids[at]): (float(self.chosen_logprobs[at]), int(self.chosen_ranks[at]))}
        ids, logprobs = self.top_ids[at, :count].tolist(), self.top_logprobs[at, :count].tolist()
        for rank, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
            found.setdefault(token, (logprob, rank))
        return found


def logprob_rows(logits: Tensor, chosen_ids: Tensor, wanted: Mapping[int, tuple[int, int]]) -> LogprobRows:
    """`logits` [m, vocab] and `chosen_ids` [m] are those of the rows that asked, in the order of `wanted`. No NaN."""
    m, vocab = logits.shape
    most = min(vocab, max(count for _, count in wanted.values()))
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    chosen = chosen_ids.unsqueeze(-1)
    # Ranks follow the logits: log_softmax may round two of them to one value.
    value = logits.gather(-1, chosen)
    earlier = torch.arange(vocab, device=logits.device) < chosen
    ranks = 1 + ((logits > value) | ((logits == value) & earlier)).sum(dim=-1)
    top_ids = leading(logits, most).ids if most else chosen.new_empty(m, 0)
    return LogprobRows(
        wanted, chosen_ids, logprobs.gather(-1, chosen).squeeze(-1), ranks, top_ids, logprobs.gather(-1, top_ids)
    )
