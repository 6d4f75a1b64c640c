"""Decides how an engine drafts tokens: how many, by which means, and where. All other parts follow this decision."""

from dataclasses import dataclass, replace

from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError
from hotset.kernels import MAX_POSITIONS
from hotset.models.checkpoint.files import ModelFiles, find_model, has_mtp_layer
from hotset.models.spec import dtype_name

DEFAULT_DRAFTS = 3  # of each request and step
MAX_VERIFIED = 256  # tokens of decoding requests with drafts in a plan; larger steps are bound by arithmetic


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How an engine drafts tokens."""

    max_drafts: int = 0  # of each request in a step; 0: nothing is drafted
    by_mtp: bool = False  # workers have the MTP layer, which drafts at the end of each step; else they are looked up
    # True if the worker that drafts also computes the first layer. It then keeps its drafts: the next plan need not
    # wait for them, and several plans in flight can verify drafts of a request.
    kept_in_worker: bool = False
    drawn: bool = False  # drafts are drawn, and verified by rejection sampling; else they are the most probable tokens
    # The most tokens, drafts included, that decoding requests have in a plan: at least one for each seat, and at most
    # all drafts of all seats, up to MAX_VERIFIED tokens.
    max_verified: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> "DraftSettings":
        seats, drafts, by_mtp = config.max_num_seqs, config.max_drafts, config.drafts_by_mtp
        return cls(
            max_drafts=drafts,
            by_mtp=by_mtp,
            kept_in_worker=by_mtp and config.pipeline_parallel_size == 1,
            drawn=config.accept == "distribution",
            max_verified=max(seats, min(seats * (1 + drafts), MAX_VERIFIED, config.max_num_batched_tokens)),
        )


def with_default_drafts(config: EngineConfig, *, on_gpu: bool) -> EngineConfig:
    """Returns the configuration with the default number of drafts, if it has none: DEFAULT_DRAFTS on a GPU that
    captures decode steps, for a model with an MTP layer; fewer if hot buffers cannot serve as many; else 0.

    `build_engine` sets the number to 0 if drafts do not pay. Workers that hand KV over to each other must agree on
    whether they draft, because the handoff includes the rows of the MTP layer.
    """
    if config.speculate is not None:
        return config
    files = find_model(config.model, config.weight_dtype, with_mtp=True)
    topk, drafts = files.spec.attention.topk, 0
    captures = on_gpu and config.cuda_graphs == "auto" and dtype_name(config.dtype, files.spec, "cuda") == "bfloat16"
    if captures and topk is not None and has_mtp_layer(files, config.load_format):
        slots = MAX_POSITIONS if config.hot_slots is None else min(MAX_POSITIONS, config.hot_slots)
        limit = slots // topk - 1 if config.tiers != "off" else DEFAULT_DRAFTS
        drafts = max(0, min(DEFAULT_DRAFTS, limit))
    return replace(config, speculate=drafts)


def check_drafts(config: EngineConfig, files: ModelFiles) -> None:
    """Raises ConfigError if drafts are configured that the model cannot make."""
    if config.drafts_by_mtp and not has_mtp_layer(files, config.load_format):
        raise ConfigError(
            f"--speculate {config.max_drafts}: {files.path} has no layer for multi-token prediction (MTP), which would "
            "draft the tokens; add --speculate-by lookup"
        )
