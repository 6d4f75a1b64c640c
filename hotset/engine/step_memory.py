"""Estimates the device memory that an engine on a GPU needs besides weights and KV. It does not use torch."""

from hotset.base.config import EngineConfig
from hotset.base.units import GIB
from hotset.engine.drafts.settings import DraftSettings
from hotset.models.feed_forward import mlp_step_values
from hotset.models.spec import ModelSpec
from hotset.models.split import Split

LIBRARY_BYTES = GIB  # loaded kernels, workspaces of the matrix libraries, and the nodes of CUDA graphs
RESIDUAL_COPIES = 6  # tensors of [tokens, hidden] that exist at once in a layer
LOGIT_COPIES = 16  # float32 tensors of [max_verified, vocab] that exist at once while a step samples by sorting
GRAPH_LOGIT_COPIES = 12  # float32 tensors of [max_verified, vocab] as large together as the logits of all graphs


def step_bytes(spec: ModelSpec, split: Split, config: EngineConfig, context: int, dtype_bytes: int) -> int:
    """Estimates the peak memory of a step of one worker, including the tables of all seats.

    `context` is the maximum context length.
    """
    tokens = config.max_num_batched_tokens
    residual = RESIDUAL_COPIES * tokens * spec.hidden * dtype_bytes
    attention = spec.attention.step_values(split, tokens, context)
    layer = max(attention, _feed_forward(spec, split, tokens)) * dtype_bytes
    logits = 4 * DraftSettings.of(config).max_verified * spec.vocab
    graphs = GRAPH_LOGIT_COPIES * logits if config.cuda_graphs == "auto" else 0
    persistent = LIBRARY_BYTES + _seat_tables(spec, config, context) + graphs
    return persistent + max(residual + layer, LOGIT_COPIES * logits)


def _feed_forward(spec: ModelSpec, split: Split, tokens: int) -> int:
    """Returns the number of values that exist at once in the MLP or MoE of one layer."""
    dense = mlp_step_values(spec.mlp_width, split, tokens)
    return dense if spec.moe is None else max(dense, spec.moe.step_values(spec.hidden, split, tokens))


def _seat_tables(spec: ModelSpec, config: EngineConfig, context: int) -> int:
    """Returns the bytes of token ids, page tables, last selections and token counts of all seats."""
    pages = 3 * 8 * context // config.page_rows
    attention = spec.attention
    selections = 0 if config.tiers == "off" else 4 * len(attention.index_layers) * (attention.topk or 0)
    token_counts = 5 * spec.vocab  # grow if requests have penalties
    return config.max_num_seqs * (4 * context + pages + selections + 2 * token_counts)
