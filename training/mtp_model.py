"""The MTP layer of the demo model for training: it predicts the token after the next one, and drafts further tokens.

Iteration 1 computes slot p from the trunk's hidden state at position p and token p + 1, and predicts token p + 2. Every
later iteration computes the next slot from the hidden state of the iteration before it, as the engine does when it
drafts. In training, each iteration computes all slots at once. A slot of iteration k then attends to the slots of
iteration 1 up to k - 1 slots before it, and to the slots that its own chain computed since.
"""

from dataclasses import dataclass

import torch
from model import SPARSE_BLOCK, DemoConfig, DemoModel, Layer, Rotation, divergence, linear, rotation
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class SlotRows:
    """The rows of the slots that one iteration computed. Later queries read them."""

    k: Tensor  # [b, heads, n, nope + rope]
    v: Tensor  # [b, heads, n, v]
    index_k: Tensor  # [b, n, index_head_dim]


class MtpLayer(nn.Module):
    """Parameters have the checkpoint's names after `model.layers.6.`, except those that `export.py` converts."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.enorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = linear(2 * config.hidden_size, config.hidden_size)
        self.layer = Layer(config, config.num_hidden_layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # shared_head.norm in the checkpoint

    def forward(
        self,
        embedded: Tensor,  # [b, n, hidden]: token p + 1
        hidden: Tensor,  # [b, n, hidden]: the trunk's normed state at p, or the state that iteration k - 1 returned
        by: Rotation,
        chain: list[SlotRows],
        *,
        sparse: bool,
        queries: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Computes one iteration, appends its rows to `chain`, and returns the hidden states before the last norm and
        the indexer's loss at the slots `queries` (None: no loss)."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        attention = self.layer.self_attn
        normed = self.layer.input_layernorm(x)
        q, k, v, q_latent = attention.qkv(normed, by)
        index_q, index_k, index_weights = attention.indexer.parts(normed, q_latent, by)
        chain.append(SlotRows(k, v, index_k))
        attended = []
        for first in range(0, x.shape[1], SPARSE_BLOCK):
            last = min(first + SPARSE_BLOCK, x.shape[1])
            block = _Block.of(chain, first, last)
            kept = block.visible
            if sparse and kept.shape[1] > self.config.index_topk:
                kept = self._selected(index_q[:, first:last], index_weights[:, first:last], block)
            mask = kept[:, None] if kept.dim() == 3 else kept
            attended.append(F.scaled_dot_product_attention(q[:, :, first:last], block.k, block.v, attn_mask=mask))
        loss = x.new_zeros((), dtype=torch.float32)
        if queries is not None:
            block = _Block.of(chain, 0, x.shape[1])
            future = ~block.visible[queries]
            with torch.no_grad():
                scores = (q[:, :, queries] @ block.k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
                target = scores.masked_fill(future, float("-inf")).softmax(-1).mean(1)
            index_scores = attention.indexer.scores(index_q[:, queries], block.index_k, index_weights[:, queries])
            loss = divergence(target, index_scores.masked_fill(future, float("-inf")))
        x = x + attention.o_proj(torch.cat(attended, dim=2).transpose(1, 2).flatten(2))
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x)), loss

    @torch.no_grad()
    def _selected(self, index_q: Tensor, weights: Tensor, block: "_Block") -> Tensor:
        """Returns [b, queries, keys] bool: the indexer's top-k of the visible keys."""
        scores = self.layer.self_attn.indexer.scores(index_q, block.index_k, weights)
        chosen = scores.masked_fill(~block.visible, float("-inf")).topk(self.config.index_topk, dim=-1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True) & block.visible


@dataclass(frozen=True)
class _Block:
    """The keys of all iterations so far that the slots [first, last) of the newest iteration can read."""

    k: Tensor
    v: Tensor
    index_k: Tensor
    visible: Tensor  # [last - first, keys] bool

    @staticmethod
    def of(chain: list[SlotRows], first: int, last: int) -> "_Block":
        device, newest = chain[0].k.device, len(chain) - 1
        slots = torch.arange(first, last, device=device)[:, None]
        low = max(0, first - newest)  # of later iterations, only the slots of the query's own chain are visible
        spans = [slice(0, last), *(slice(low, last) for _ in chain[1:])]
        keys = [torch.arange(span.start, last, device=device) for span in spans]
        visible = [keys[0] <= slots - newest] + [
            keys[number] == slots - newest + number for number in range(1, len(chain))
        ]
        pairs = list(zip(chain, spans, strict=True))
        return _Block(
            k=torch.cat([rows.k[:, :, span] for rows, span in pairs], dim=2),
            v=torch.cat([rows.v[:, :, span] for rows, span in pairs], dim=2),
            index_k=torch.cat([rows.index_k[:, span] for rows, span in pairs], dim=1),
            visible=torch.cat(visible, dim=1),
        )


@dataclass(frozen=True)
class Prediction:
    """The predictions of one iteration. Slot p predicts token p + 2, like the trunk at position p + 1."""

    logits: Tensor  # [b, n - 2, vocab]
    first_slot: int  # earlier slots have no chain


class Drafts(nn.Module):
    """A frozen trunk and the layer that is trained to predict the trunk's own distributions."""

    def __init__(self, trunk: DemoModel) -> None:
        super().__init__()
        self.trunk = trunk.eval().requires_grad_(False)
        self.mtp = MtpLayer(trunk.config)

    @torch.no_grad()
    def trunk_states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the trunk's normed hidden states [b, n, hidden], and its logits for the tokens 2 to n - 1."""
        hidden, _ = self.trunk(tokens, "sparse")
        return hidden, self.trunk.logits(hidden[:, 1:-1])

    def forward(
        self, tokens: Tensor, hidden: Tensor, iterations: int, *, sparse: bool, queries: Tensor | None
    ) -> tuple[list[Prediction], Tensor]:
        """Returns the prediction of each iteration, and the indexer's loss summed over iterations."""
        c = self.trunk.config
        scale = c.hidden_size**0.5  # the exported norm is divided by it, and the exported embedding multiplied
        by = rotation(tokens.shape[1], c.qk_rope_head_dim, c.rope_theta, tokens.device)
        embedded = self.trunk.embed_tokens(tokens.roll(-1, dims=1)) * scale
        chain: list[SlotRows] = []
        predictions = []
        carried, total = hidden / scale, torch.zeros((), device=tokens.device)
        for number in range(iterations):
            state, loss = self.mtp(embedded, carried, by, chain, sparse=sparse, queries=queries)
            predictions.append(Prediction(self.trunk.logits(self.mtp.norm(state[:, :-2])), number))
            carried, total = state.roll(1, dims=1), total + loss
        return predictions, total


def draft_loss(predictions: list[Prediction], trunk_logits: Tensor, weights: Tensor) -> Tensor:
    """Returns the mean over iterations of KL(trunk || prediction), weighted by `weights` [b, n - 2]."""
    target = trunk_logits.float().log_softmax(-1)
    losses = []
    for prediction in predictions:
        divergences = F.kl_div(
            prediction.logits.float().log_softmax(-1), target, reduction="none", log_target=True
        ).sum(-1)
        known = weights.clone()
        known[:, : prediction.first_slot] = 0.0
        losses.append((divergences * known).sum() / known.sum())
    return torch.stack(losses).mean()


def accepted_lengths(predictions: list[Prediction], trunk_logits: Tensor) -> Tensor:
    """Returns [b, n - 2 - drafts + 1]: for each slot, how many tokens a step that begins to draft there would commit.

    Counts the drafts before the first one that differs from the trunk's most probable token, and one token of the trunk
    itself. The context is the sequence, not the trunk's own answer.
    """
    wanted = trunk_logits.argmax(-1)
    count = wanted.shape[1] - len(predictions) + 1
    accepted = torch.ones_like(wanted[:, :count])
    so_far = torch.ones_like(accepted, dtype=torch.bool)
    for number, prediction in enumerate(predictions):
        matches = prediction.logits.argmax(-1) == wanted
        so_far = so_far & matches[:, number : number + count]
        accepted = accepted + so_far
    return accepted
