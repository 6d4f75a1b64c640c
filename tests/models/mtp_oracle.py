"""The MTP layer in plain torch, written from the published description (docs/mtp.md), without caches or pages.

All slots of a request are computed at once and in full: attention is a dense softmax over a mask of the selected slots.
Weights come by the names of published checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = Callable[[str, tuple[int, ...]], Tensor]  # name, shape -> values


@dataclass(frozen=True)
class Sizes:
    """Fields of config.json, and what differs between the two families."""

    layer: int
    hidden: int
    vocab: int
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v: int
    index_heads: int
    index_dim: int
    topk: int
    experts: int
    experts_per_token: int
    width: int
    groups: int
    topk_group: int
    routed_scale: float
    eps: float
    theta: float
    bias: bool
    tied: bool
    interleaved_index_rope: bool
    carries_normed: bool
    shares_selection: bool


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, position: Tensor, theta: float, interleaved: bool) -> Tensor:
    """Rotates the last dimension of x [n, ..., dim] by the angles of `position` [n]."""
    half = x.shape[-1] // 2
    angles = position[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = angles.view(len(position), *[1] * (x.dim() - 2), half)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


@dataclass(frozen=True)
class Iteration:
    logits: Tensor  # [slots, vocab]
    carried: Tensor  # [slots, hidden]
    chosen: list[Tensor]  # per slot: the slots that it reads


class MtpOracle:
    """Computes slots: slot p has the hidden state of position p and the token at position p + 1."""

    def __init__(self, sizes: Sizes, weights: Weights) -> None:
        self._s, self._load = sizes, weights

    def _w(self, name: str, *shape: int) -> Tensor:
        return self._load(f"model.layers.{self._s.layer}.{name}", shape)

    def __call__(self, tokens: Sequence[int], hidden: Tensor, known: int, chosen: Tensor | None = None) -> Iteration:
        """`tokens[p]` is the token at position p + 1, `hidden[p]` the hidden state that slot p gets. The first `known`
        slots belong to the first iteration; later ones use the slots `chosen` instead of selecting, if given."""
        s = self._s
        embedding = self._load("model.embed_tokens.weight", (s.vocab, s.hidden))
        head = embedding if s.tied else self._load("lm_head.weight", (s.vocab, s.hidden))
        joined = torch.cat(
            (
                rms(embedding[torch.tensor(tokens)], self._w("enorm.weight", s.hidden), s.eps),
                rms(hidden, self._w("hnorm.weight", s.hidden), s.eps),
            ),
            dim=1,
        )
        x = joined @ self._w("eh_proj.weight", s.hidden, 2 * s.hidden).T
        attended, selected = self._attention(rms(x, self._w("input_layernorm.weight", s.hidden), s.eps), known, chosen)
        x = x + attended
        x = x + self._mlp(rms(x, self._w("post_attention_layernorm.weight", s.hidden), s.eps))
        normed = rms(x, self._w("shared_head.norm.weight", s.hidden), s.eps)
        return Iteration(normed @ head.T, normed if s.carries_normed else x, selected)

    def _attention(self, x: Tensor, known: int, chosen: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        s, n = self._s, len(x)
        position = torch.arange(n, dtype=x.dtype)

        def linear(name: str, outputs: int, inputs: int, of: Tensor, bias: bool = False) -> Tensor:
            out = of @ self._w(f"self_attn.{name}.weight", outputs, inputs).T
            return out + self._w(f"self_attn.{name}.bias", outputs) if bias else out

        down = linear("q_a_proj", s.q_rank, s.hidden, x, s.bias)
        latent = rms(down, self._w("self_attn.q_a_layernorm.weight", s.q_rank), 1e-6)
        q = linear("q_b_proj", s.heads * (s.nope + s.rope), s.q_rank, latent).view(n, s.heads, -1)
        kv = linear("kv_a_proj_with_mqa", s.kv_rank + s.rope, s.hidden, x, s.bias)
        compressed = rms(kv[:, : s.kv_rank], self._w("self_attn.kv_a_layernorm.weight", s.kv_rank), 1e-6)
        up = linear("kv_b_proj", s.heads * (s.nope + s.v), s.kv_rank, compressed).view(n, s.heads, -1)
        rope_key = rotated(kv[:, s.kv_rank :], position, s.theta, interleaved=True)
        q_rope = rotated(q[..., s.nope :], position, s.theta, interleaved=True)
        scores = torch.einsum("qhd,khd->hqk", q[..., : s.nope], up[..., : s.nope])
        scores = (scores + torch.einsum("qhd,kd->hqk", q_rope, rope_key)) * (s.nope + s.rope) ** -0.5
        selected = self._select(x, latent, position)
        if chosen is not None:
            selected[known:] = [chosen] * (n - known)
        mask = torch.full((n, n), float("-inf"), dtype=x.dtype)
        for slot, slots in enumerate(selected):
            mask[slot, slots] = 0.0
        values = torch.einsum("hqk,khd->qhd", (scores + mask).softmax(-1), up[..., s.nope :]).flatten(1)
        return linear("o_proj", s.hidden, s.heads * s.v, values, s.bias), selected

    def _select(self, x: Tensor, latent: Tensor, position: Tensor) -> list[Tensor]:
        s, n = self._s, len(x)
        prefix = "self_attn.indexer"
        q = (latent @ self._w(f"{prefix}.wq_b.weight", s.index_heads * s.index_dim, s.q_rank).T).view(
            n, s.index_heads, -1
        )
        k = x @ self._w(f"{prefix}.wk.weight", s.index_dim, s.hidden).T
        weight, bias = (self._w(f"{prefix}.k_norm.{part}", s.index_dim) for part in ("weight", "bias"))
        k = torch.nn.functional.layer_norm(k, (s.index_dim,), weight, bias, 1e-6)
        q, k = (
            torch.cat(
                (rotated(part[..., : s.rope], position, s.theta, s.interleaved_index_rope), part[..., s.rope :]), -1
            )
            for part in (q, k)
        )
        head_weights = x @ self._w(f"{prefix}.weights_proj.weight", s.index_heads, s.hidden).T
        scores = torch.einsum("qhd,kd->qhk", q, k).relu() * s.index_dim**-0.5
        scores = (scores * head_weights[:, :, None] * s.index_heads**-0.5).sum(1)
        best = [scores[slot, : slot + 1].sort(descending=True, stable=True).indices[: s.topk] for slot in range(n)]
        return [slots.sort().values for slots in best]

    def _mlp(self, x: Tensor) -> Tensor:
        """Routed experts of the best groups, and one shared expert."""
        s = self._s

        def expert(name: str, of: Tensor) -> Tensor:
            gate, up = (of @ self._w(f"mlp.{name}.{half}_proj.weight", s.width, s.hidden).T for half in ("gate", "up"))
            return (torch.nn.functional.silu(gate) * up) @ self._w(f"mlp.{name}.down_proj.weight", s.hidden, s.width).T

        affinity = (x @ self._w("mlp.gate.weight", s.experts, s.hidden).T).sigmoid()
        corrected = affinity + self._w("mlp.gate.e_score_correction_bias", s.experts)
        rows = []
        for token in range(len(x)):
            by_group = corrected[token].view(s.groups, -1)
            group_scores = by_group.topk(2, dim=1).values.sum(1)
            allowed = torch.zeros(s.groups, dtype=torch.bool)
            allowed[group_scores.topk(s.topk_group).indices] = True
            open_to = torch.where(allowed[:, None], by_group, float("-inf")).flatten()
            best = open_to.topk(s.experts_per_token).indices
            shares = affinity[token, best] / affinity[token, best].sum() * s.routed_scale
            of_token = x[token : token + 1]
            routed = sum(
                share * expert(f"experts.{number}", of_token) for share, number in zip(shares, best, strict=True)
            )
            rows.append(routed + expert("shared_experts", of_token))
        return torch.cat(rows)
