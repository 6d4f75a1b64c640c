"""The demo model for training: deepseek_v32 in plain torch, with dense or sparse attention and an indexer loss.

The engine's decoder (`hotset/models/attention/dsa.py`) serves the trained model. Most parameters have the
checkpoint's names; `export.py` converts the others. MLA is not in absorbed form here, because training computes every
position at once.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class DemoConfig:
    """Fields of config.json. Rows (512 + 64) and index keys (128) are as large as in production models."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    q_lora_rank: int = 192
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 32
    index_n_heads: int = 4
    index_head_dim: int = 128
    index_topk: int = 128
    intermediate_size: int = 704
    first_k_dense_replace: int = 2
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 160
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.0
    rope_theta: float = 50000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 16384

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        theta = fields.pop("rope_theta")
        return fields | {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "num_key_value_heads": self.num_attention_heads,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "dtype": "bfloat16",
        }


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """Returns a linear layer whose outputs have `gain` times the standard deviation of its inputs.

    With the usual standard deviation of 0.02, the product of MLA's four matrices is near zero, and look-up heads take
    thousands of steps to form.
    """
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain * inputs**-0.5)
    return layer


@dataclass(frozen=True)
class Rotation:
    cos: Tensor  # [length, dim / 2]
    sin: Tensor


def rotation(length: int, dim: int, theta: float, device: torch.device) -> Rotation:
    inverse = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse
    return Rotation(angles.cos(), angles.sin())


def rotate(first: Tensor, second: Tensor, by: Rotation) -> Tensor:
    """Rotates two halves [batch, length, heads, dim / 2] and returns [batch, length, heads, dim]."""
    cos, sin = by.cos[:, None].to(first.dtype), by.sin[:, None].to(first.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_pairs(x: Tensor, by: Rotation) -> Tensor:
    return rotate(x[..., 0::2], x[..., 1::2], by)


def rotate_halves(x: Tensor, by: Rotation) -> Tensor:
    return rotate(*x.chunk(2, dim=-1), by)


class Indexer(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.wq_b = linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.wk = linear(config.hidden_size, config.index_head_dim)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6)
        self.weights_proj = linear(config.hidden_size, config.index_n_heads)

    def parts(self, x: Tensor, q_latent: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [b, n, heads, d], keys [b, n, d] and head weights [b, n, heads]. Inputs get no gradient."""
        c = self.config
        x, q_latent = x.detach(), q_latent.detach()
        q = self.wq_b(q_latent).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        k = self.k_norm(self.wk(x))[:, :, None]
        rope = c.qk_rope_head_dim
        q = torch.cat((rotate_halves(q[..., :rope], by), q[..., rope:]), dim=-1)
        k = torch.cat((rotate_halves(k[..., :rope], by), k[..., rope:]), dim=-1)[:, :, 0]
        return q, k, self.weights_proj(x) * c.index_n_heads**-0.5

    def scores(self, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Returns float32 scores [b, queries, keys] of queries [b, queries, heads, d] and keys [b, keys, d]."""
        by_head = F.relu(torch.einsum("bqhd,bkd->bqhk", q, k).float() * self.config.index_head_dim**-0.5)
        return torch.einsum("bqh,bqhk->bqk", weights.float(), by_head)


class Attention(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        c = self.config = config
        head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, eps=1e-6)
        self.q_b_proj = linear(c.q_lora_rank, c.num_attention_heads * head_dim)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, eps=1e-6)
        self.kv_b_proj = linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, (2 * c.num_hidden_layers) ** -0.5)
        self.indexer = Indexer(config)

    def qkv(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns Q and K [b, heads, n, nope + rope], V [b, heads, n, v], and the query latent."""
        c = self.config
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).unflatten(-1, (c.num_attention_heads, -1))
        q = torch.cat((q[..., : c.qk_nope_head_dim], rotate_pairs(q[..., c.qk_nope_head_dim :], by)), dim=-1)
        latent, rope_key = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.num_attention_heads, -1))
        rope_key = rotate_pairs(rope_key[:, :, None], by).expand(-1, -1, c.num_attention_heads, -1)
        k = torch.cat((kv[..., : c.qk_nope_head_dim], rope_key), dim=-1)
        v = kv[..., c.qk_nope_head_dim :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), q_latent

    def dense(self, x: Tensor, by: Rotation) -> Tensor:
        q, k, v, _ = self.qkv(x, by)
        return self._out(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def warm_up(self, x: Tensor, by: Rotation, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Returns dense attention and the indexer's loss at the positions `queries`."""
        q, k, v, q_latent = self.qkv(x, by)
        out = self._out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out, self._index_loss(q, k, self.indexer.parts(x, q_latent, by), queries)

    def sparse(self, x: Tensor, by: Rotation, queries: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns attention over each query's top-k, and the indexer's loss at the positions `queries` (None: no loss).

        The indexer's target is dense attention over all positions, because from its own selection the indexer could
        not learn which positions it misses.
        """
        q, k, v, q_latent = self.qkv(x, by)
        parts = self.indexer.parts(x, q_latent, by)
        out = []
        for first in range(0, x.shape[1], SPARSE_BLOCK):
            last = min(first + SPARSE_BLOCK, x.shape[1])
            kept = self._kept(parts, first, last)
            block = q[:, :, first:last], k[:, :, :last], v[:, :, :last]
            out.append(F.scaled_dot_product_attention(*block, attn_mask=kept[:, None]))
        loss = x.new_zeros((), dtype=torch.float32) if queries is None else self._index_loss(q, k, parts, queries)
        return self._out(torch.cat(out, dim=2)), loss

    @torch.no_grad()
    def _kept(self, parts: tuple[Tensor, Tensor, Tensor], first: int, last: int) -> Tensor:
        """Returns [b, last - first, last] bool: the positions that the queries [first, last) attend to."""
        q, k, weights = parts
        positions = torch.arange(last, device=q.device)
        future = positions > positions[first:, None]
        scores = self.indexer.scores(q[:, first:last], k[:, :last], weights[:, first:last])
        scores = scores.masked_fill(future, float("-inf"))
        topk = self.config.index_topk
        if last <= topk:
            return ~future.expand_as(scores)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(topk, dim=-1).indices, True)
        # Many scores are exactly 0. A threshold instead of indices could therefore keep more than top-k positions.
        return chosen & ~future

    def _index_loss(self, q: Tensor, k: Tensor, parts: tuple[Tensor, Tensor, Tensor], queries: Tensor) -> Tensor:
        """Returns the KL divergence of the indexer's distribution from dense attention's at the positions `queries`."""
        index_q, index_k, weights = parts
        future = torch.arange(k.shape[2], device=k.device) > queries[:, None]
        with torch.no_grad():
            scores = (q[:, :, queries] @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
            target = scores.masked_fill(future, float("-inf")).softmax(-1).mean(1)  # [b, queries, n]
        index_scores = self.indexer.scores(index_q[:, queries], index_k, weights[:, queries])
        return divergence(target, index_scores.masked_fill(future, float("-inf")))

    def _out(self, attended: Tensor) -> Tensor:
        return self.o_proj(attended.transpose(1, 2).flatten(2))


SPARSE_BLOCK = 512  # queries whose mask is computed at once


def divergence(target: Tensor, scores: Tensor) -> Tensor:
    """Returns the mean over queries of KL(target || softmax(scores)). The target is 0 where the score is -inf."""
    log_q = scores.log_softmax(-1).masked_fill(scores == float("-inf"), 0.0)
    return -(target * log_q).sum(-1).mean() + (target * target.clamp_min(1e-9).log()).sum(-1).mean()


class Mlp(nn.Module):
    def __init__(self, config: DemoConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, width)
        self.up_proj = linear(config.hidden_size, width)
        self.down_proj = linear(width, config.hidden_size, (2 * config.num_hidden_layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Moe(nn.Module):
    """Computes every expert and weights most of them by zero, which is faster than routing at this size."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        c = self.config = config
        width, experts = c.moe_intermediate_size, c.n_routed_experts
        self.gate = linear(c.hidden_size, experts)
        self.register_buffer("correction", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))
        self.gate_up = nn.Parameter(torch.randn(experts * 2 * width, c.hidden_size) * c.hidden_size**-0.5)
        scale = width**-0.5 * (2 * c.num_hidden_layers) ** -0.5
        self.down = nn.Parameter(torch.randn(experts * width, c.hidden_size) * scale)
        self.shared_experts = Mlp(c, width * c.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        scores = torch.sigmoid(F.linear(x.float(), self.gate.weight.float()))
        chosen = (scores + self.correction).topk(c.num_experts_per_tok, dim=-1).indices
        selected = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load += selected.detach().sum((0, 1))
        weights = scores * selected
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        gate, up = F.linear(x, self.gate_up).unflatten(-1, (c.n_routed_experts, 2, -1)).unbind(-2)
        hidden = F.silu(gate) * up * weights[..., None].to(x.dtype)
        return hidden.flatten(-2) @ self.down.to(hidden.dtype) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Lowers the corrections of overloaded experts and raises the others, instead of adding a loss term."""
        self.correction += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Layer(nn.Module):
    def __init__(self, config: DemoConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        dense = layer < config.first_k_dense_replace
        self.mlp: nn.Module = Mlp(config, config.intermediate_size) if dense else Moe(config)

    def forward(self, x: Tensor, by: Rotation, mode: str, queries: Tensor | None) -> tuple[Tensor, Tensor]:
        normed = self.input_layernorm(x)
        loss = x.new_zeros((), dtype=torch.float32)
        if mode == "dense":
            attended = self.self_attn.dense(normed, by)
        elif mode == "warm_up":
            assert queries is not None
            attended, loss = self.self_attn.warm_up(normed, by, queries)
        else:
            attended, loss = self.self_attn.sparse(normed, by, queries)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), loss


class DemoModel(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=config.hidden_size**-0.5)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, tokens: Tensor, mode: str, queries: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns hidden states [b, n, hidden] after the last norm, and the indexers' loss summed over layers."""
        c = self.config
        by = rotation(tokens.shape[1], c.qk_rope_head_dim, c.rope_theta, tokens.device)
        x = self.embed_tokens(tokens) * c.hidden_size**0.5
        total = torch.zeros((), device=tokens.device)
        for layer in self.layers:
            x, loss = layer(x, by, mode, queries)
            total = total + loss
        return self.norm(x), total

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)
