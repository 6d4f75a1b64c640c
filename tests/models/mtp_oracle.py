"""The MTP layer in plain torch, written from the published description (docs/mtp.md), without caches or pages.

All slots of a request are computed at once and in full: attention is a dense softmax over a mask of the selected slots.
Weights come by the names of published checkpoints.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.models.attention.dsa_spec import MlaSpec
from hotset.models.spec import ModelSpec

Weights = Callable[[str, tuple[int, ...]], Tensor]  # name, shape -> values


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

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        assert isinstance(spec.attention, MlaSpec) and spec.moe is not None and spec.mtp is not None
        self._spec, self._mla, self._moe, self._mtp, self._load = spec, spec.attention, spec.moe, spec.mtp, weights

    def _w(self, name: str, *shape: int) -> Tensor:
        return self._load(f"model.layers.{self._spec.layers}.{name}", shape)

    def __call__(self, tokens: Sequence[int], hidden: Tensor, known: int, chosen: Tensor | None = None) -> Iteration:
        """`tokens[p]` is the token at position p + 1, `hidden[p]` the hidden state that slot p gets. The first `known`
        slots belong to the first iteration; later ones use the slots `chosen` instead of selecting, if given."""
        s = self._spec
        embedding = self._load("model.embed_tokens.weight", (s.vocab, s.hidden))
        head = embedding if s.tied_embeddings else self._load("lm_head.weight", (s.vocab, s.hidden))
        joined = torch.cat(
            (
                rms(embedding[torch.tensor(tokens)], self._w("enorm.weight", s.hidden), s.norm_eps),
                rms(hidden, self._w("hnorm.weight", s.hidden), s.norm_eps),
            ),
            dim=1,
        )
        x = joined @ self._w("eh_proj.weight", s.hidden, 2 * s.hidden).T
        attended, selected = self._attention(
            rms(x, self._w("input_layernorm.weight", s.hidden), s.norm_eps), known, chosen
        )
        x = x + attended
        x = x + self._mlp(rms(x, self._w("post_attention_layernorm.weight", s.hidden), s.norm_eps))
        normed = rms(x, self._w("shared_head.norm.weight", s.hidden), s.norm_eps)
        return Iteration(normed @ head.T, normed if self._mtp.carries_normed else x, selected)

    def _attention(self, x: Tensor, known: int, chosen: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        s, mla, n = self._spec, self._mla, len(x)
        position = torch.arange(n, dtype=x.dtype)

        def linear(name: str, outputs: int, inputs: int, of: Tensor, bias: bool = False) -> Tensor:
            out = of @ self._w(f"self_attn.{name}.weight", outputs, inputs).T
            return out + self._w(f"self_attn.{name}.bias", outputs) if bias else out

        down = linear("q_a_proj", mla.q_lora_rank, s.hidden, x, mla.bias)
        latent = rms(down, self._w("self_attn.q_a_layernorm.weight", mla.q_lora_rank), 1e-6)
        q = linear("q_b_proj", mla.heads * (mla.nope_dim + mla.rope_dim), mla.q_lora_rank, latent).view(
            n, mla.heads, -1
        )
        kv = linear("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.rope_dim, s.hidden, x, mla.bias)
        compressed = rms(kv[:, : mla.kv_lora_rank], self._w("self_attn.kv_a_layernorm.weight", mla.kv_lora_rank), 1e-6)
        up = linear("kv_b_proj", mla.heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank, compressed).view(
            n, mla.heads, -1
        )
        rope_key = rotated(kv[:, mla.kv_lora_rank :], position, s.rope.theta, interleaved=True)
        q_rope = rotated(q[..., mla.nope_dim :], position, s.rope.theta, interleaved=True)
        scores = torch.einsum("qhd,khd->hqk", q[..., : mla.nope_dim], up[..., : mla.nope_dim])
        scores = (scores + torch.einsum("qhd,kd->hqk", q_rope, rope_key)) * (mla.nope_dim + mla.rope_dim) ** -0.5
        selected = self._select(x, latent, position)
        if chosen is not None:
            selected[known:] = [chosen] * (n - known)
        mask = torch.full((n, n), float("-inf"), dtype=x.dtype)
        for slot, slots in enumerate(selected):
            mask[slot, slots] = 0.0
        values = torch.einsum("hqk,khd->qhd", (scores + mask).softmax(-1), up[..., mla.nope_dim :]).flatten(1)
        return linear("o_proj", s.hidden, mla.heads * mla.v_dim, values, mla.bias), selected

    def _select(self, x: Tensor, latent: Tensor, position: Tensor) -> list[Tensor]:
        s, mla, index, n = self._spec, self._mla, self._mla.index, len(x)
        prefix = "self_attn.indexer"
        q = (latent @ self._w(f"{prefix}.wq_b.weight", index.heads * index.head_dim, mla.q_lora_rank).T).view(
            n, index.heads, -1
        )
        k = x @ self._w(f"{prefix}.wk.weight", index.head_dim, s.hidden).T
        weight, bias = (self._w(f"{prefix}.k_norm.{part}", index.head_dim) for part in ("weight", "bias"))
        k = torch.nn.functional.layer_norm(k, (index.head_dim,), weight, bias, 1e-6)
        q, k = (
            torch.cat(
                (
                    rotated(part[..., : mla.rope_dim], position, s.rope.theta, index.interleaved_rope),
                    part[..., mla.rope_dim :],
                ),
                -1,
            )
            for part in (q, k)
        )
        head_weights = x @ self._w(f"{prefix}.weights_proj.weight", index.heads, s.hidden).T
        scores = torch.einsum("qhd,kd->qhk", q, k).relu() * index.head_dim**-0.5
        scores = (scores * head_weights[:, :, None] * index.heads**-0.5).sum(1)
        best = [scores[slot, : slot + 1].sort(descending=True, stable=True).indices[: index.topk] for slot in range(n)]
        return [slots.sort().values for slots in best]

    def _mlp(self, x: Tensor) -> Tensor:
        """Computes the routed experts of the best groups, and one shared expert."""
        s, moe = self._spec, self._moe

        def expert(name: str, of: Tensor) -> Tensor:
            gate, up = (
                of @ self._w(f"mlp.{name}.{half}_proj.weight", moe.width, s.hidden).T for half in ("gate", "up")
            )
            return (torch.nn.functional.silu(gate) * up) @ self._w(
                f"mlp.{name}.down_proj.weight", s.hidden, moe.width
            ).T

        affinity = (x @ self._w("mlp.gate.weight", moe.experts, s.hidden).T).sigmoid()
        corrected = affinity + self._w("mlp.gate.e_score_correction_bias", moe.experts)
        rows = []
        for token in range(len(x)):
            by_group = corrected[token].view(moe.groups, -1)
            group_scores = by_group.topk(2, dim=1).values.sum(1)
            allowed = torch.zeros(moe.groups, dtype=torch.bool)
            allowed[group_scores.topk(moe.topk_group).indices] = True
            open_to = torch.where(allowed[:, None], by_group, float("-inf")).flatten()
            best = open_to.topk(moe.experts_per_token).indices
            shares = affinity[token, best] / affinity[token, best].sum() * moe.scale
            of_token = x[token : token + 1]
            routed = sum(
                share * expert(f"experts.{number}", of_token) for share, number in zip(shares, best, strict=True)
            )
            rows.append(routed + expert("shared_experts", of_token))
        return torch.cat(rows)
