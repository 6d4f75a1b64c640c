"""Log-probabilities of the model's own logits: of sampled tokens, and of the tokens of prompts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.base.units import MIB
from hotset.kernels.draw import leading

# The logits of a prompt are computed in slices of this many bytes (in float32): those of 8192 tokens and a vocabulary
# of 154,880 would have 5 GB. The temporary tensors of a slice have about six times as many bytes.
SLICE_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """The log-probabilities of `m` tokens, and of the likeliest tokens at the same positions.

    Ranks start at 1 and are unique: ties are ranked by ascending id. A token with logit -inf has log-probability -inf.
    """

    logprobs: Tensor  # [m]
    ranks: Tensor  # [m] int64
    top_ids: Tensor  # [m, most] int64, likeliest first
    top_logprobs: Tensor  # [m, most]


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """The log-probabilities of the sampled tokens of the `m` requests of a batch that requested them."""

    entries: Mapping[int, tuple[int, int]]  # index in the batch -> (index in the tensors, number of alternatives)
    token_ids: Tensor  # [m] int64
    computed: LogprobTensors

    def to_host(self) -> "SampledLogprobs":
        """Copies everything to host memory and waits for the device, so that later calls of `of` do not wait."""
        computed = self.computed
        on_host = LogprobTensors(
            computed.logprobs.cpu(), computed.ranks.cpu(), computed.top_ids.cpu(), computed.top_logprobs.cpu()
        )
        return SampledLogprobs(self.entries, self.token_ids.cpu(), on_host)

    def of(self, index: int) -> dict[int, tuple[float, int]] | None:
        """Returns {token id: (log-probability, rank)} of one request of the batch, or None if it requested none.

        The sampled token comes first, then the likeliest ones.
        """
        if index not in self.entries:
            return None
        entry, count = self.entries[index]
        computed = self.computed
        logprobs = {int(self.token_ids[entry]): (float(computed.logprobs[entry]), int(computed.ranks[entry]))}
        top = zip(computed.top_ids[entry, :count].tolist(), computed.top_logprobs[entry, :count].tolist(), strict=True)
        for rank, (token, logprob) in enumerate(top, start=1):
            logprobs.setdefault(token, (logprob, rank))
        return logprobs


def finite_logits(logits: Tensor) -> Tensor:
    """Returns the logits in float32 or better. NaN counts as -inf, and inf as the largest finite number."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype).nan_to_num(nan=-torch.inf, posinf=torch.finfo(dtype).max, neginf=-torch.inf)


def token_logprobs(logits: Tensor, token_ids: Tensor, alternatives: int) -> LogprobTensors:
    """Computes the log-probabilities of `token_ids` [m] and of the likeliest tokens from `finite_logits` [m, vocab]."""
    m, vocab = logits.shape
    most = min(vocab, alternatives)
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    chosen = token_ids.unsqueeze(-1)
    # Ranks follow the logits, because log_softmax may round two different logits to one value.
    value = logits.gather(-1, chosen)
    earlier = torch.arange(vocab, device=logits.device) < chosen
    ranks = 1 + ((logits > value) | ((logits == value) & earlier)).sum(dim=-1)
    top_ids = leading(logits, most) if most else chosen.new_empty(m, 0)
    return LogprobTensors(logprobs.gather(-1, chosen).squeeze(-1), ranks, top_ids, logprobs.gather(-1, top_ids))


def prompt_logprobs(
    logits_of: Callable[[Tensor], Tensor], indices: Tensor, token_ids: Tensor, alternatives: int, vocab: int
) -> LogprobTensors:
    """Computes the log-probabilities of `token_ids` [m], in slices of at most SLICE_BYTES of logits.

    `logits_of` returns the logits [n, vocab] at some of the `indices` [m].
    """
    rows = max(1, SLICE_BYTES // (4 * vocab))
    slices = [
        token_logprobs(finite_logits(logits_of(some_indices)), some_ids, alternatives)
        for some_indices, some_ids in zip(indices.split(rows), token_ids.split(rows), strict=True)
    ]
    return LogprobTensors(
        logprobs=torch.cat([part.logprobs for part in slices]),
        ranks=torch.cat([part.ranks for part in slices]),
        top_ids=torch.cat([part.top_ids for part in slices]),
        top_logprobs=torch.cat([part.top_logprobs for part in slices]),
    )
