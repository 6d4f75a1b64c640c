"""Estimates the device memory that an engine on a GPU needs besides weights and KV. It does not use torch."""

from hotset.base.config import EngineConfig
from hotset.base.units import GIB, MIB
from hotset.models.spec import GqaSpec, MlaSpec, ModelSpec
from hotset.models.split import Split
from hotset.schedule.drafts import max_verified

LIBRARY_BYTES = GIB  # loaded kernels, workspaces of the matrix libraries, and the nodes of CUDA graphs
INDEX_WORKSPACE_BYTES = 256 * MIB  # the scores of an indexer; `index_topk` processes larger batches in parts
RESIDUAL_COPIES = 6  # tensors of [tokens, hidden] that exist at once in a layer
LOGIT_COPIES = 16  # float32 tensors of [seats, vocab] that exist at once while a step samples by sorting
GRAPH_LOGIT_COPIES = 12  # float32 tensors of [seats, vocab] with as many entries as the logits of all captured graphs


def step_bytes(spec: ModelSpec, split: Split, config: EngineConfig, context: int, dtype_bytes: int) -> int:
    """Estimates the most memory that a step of one worker takes, and the tables of all seats.

    `context` is the maximum context length.
    """
    tokens, seats = config.max_num_batched_tokens, config.max_num_seqs
    residual = RESIDUAL_COPIES * tokens * spec.hidden * dtype_bytes
    layer = max(_attention(spec, split, tokens, context), _feed_forward(spec, split, tokens)) * dtype_bytes
    sampled = max_verified(seats, tokens, config.max_drafts)
    logits = 4 * sampled * spec.vocab
    graphs = GRAPH_LOGIT_COPIES * logits if config.cuda_graphs == "auto" else 0
    persistent = LIBRARY_BYTES + _seat_tables(spec, config, context) + graphs
    return persistent + max(residual + layer, LOGIT_COPIES * logits)


def _attention(spec: ModelSpec, split: Split, tokens: int, context: int) -> int:
    """Returns the number of values that exist at once in the attention of one layer."""
    attention = spec.attention
    heads = len(split.tp_shard(attention.heads))
    if isinstance(attention, GqaSpec):
        # A prompt's attention gathers the whole context and repeats it for the heads that share a KV head.
        return 4 * tokens * heads * attention.head_dim + 3 * context * heads * attention.head_dim
    latent = attention.kv_lora_rank + attention.rope_dim
    per_head = attention.nope_dim + attention.rope_dim + 2 * latent + attention.v_dim
    selected = 4 * 2 * attention.index.topk  # positions and rows, as int64
    indexer = 2 * attention.index.heads * attention.index.head_dim
    return tokens * (heads * per_head + selected + indexer) + INDEX_WORKSPACE_BYTES // 2


def _feed_forward(spec: ModelSpec, split: Split, tokens: int) -> int:
    """Returns the number of values that exist at once in the MLP or MoE of one layer."""
    dense = 3 * tokens * len(split.tp_shard(spec.mlp_width))
    if spec.moe is None:
        return dense
    # Data parallel ranks compute the tokens of all ranks.
    pairs = tokens * split.dp_size * spec.moe.experts_per_token
    return max(dense, pairs * (2 * spec.hidden + 3 * spec.moe.width) + tokens * split.dp_size * 2 * spec.hidden)


def _seat_tables(spec: ModelSpec, config: EngineConfig, context: int) -> int:
    """Returns the bytes of token ids, page tables, last selections and token counts of all seats."""
    pages = 3 * 8 * context // config.page_rows
    selections = 0
    if isinstance(spec.attention, MlaSpec) and config.tiers != "off":
        selections = 4 * len(spec.attention.index.full_layers) * spec.attention.index.topk
    token_counts = 5 * spec.vocab  # grow if requests have penalties
    return config.max_num_seqs * (4 * context + pages + selections + 2 * token_counts)
