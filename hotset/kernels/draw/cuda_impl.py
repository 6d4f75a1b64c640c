"""draw, accept_or_replace and leading in CUDA C++: constants and launch shapes. One block works for one request."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hotset.kernels import cuda_source
from hotset.kernels.cuda_source import LaunchShape
from hotset.kernels.draw import MAX_LEADING
from hotset.kernels.draw.reference import DrawRules

DRAW, ACCEPT, LEADING = (Path(__file__).with_name(name) for name in ("draw.cu", "accept.cu", "leading.cu"))
BINS = 2048


@dataclass(frozen=True, slots=True)
class DrawTuning:
    """Parameters that affect only speed."""

    threads: int = 1024  # per block: a power of two from 64 to 1024
    loads: int = 4  # logits that a thread loads at a time. With 8 and 1024 threads, the kernel spills registers

    @property
    def shared_bytes(self) -> int:
        """The size of `Shared` in places.cu."""
        return 2 * 3 * 4 * BINS + self.threads // 32 * 16 + 56

    @property
    def constants(self) -> dict[str, int]:
        return {"THREADS": self.threads, "LOADS": self.loads, "SHARED_BYTES": self.shared_bytes}


TUNED = DrawTuning()


def draw(x: Tensor, rules: DrawRules, keys: Tensor, positions: Tensor, tuning: DrawTuning = TUNED) -> Tensor:
    return _draw(DRAW, "draw", tuning, x, x.shape[1], *_columns(*rules.columns, keys, positions))


def accept_or_replace(
    x: Tensor,
    draft_logits: Tensor,
    drafts: Tensor,
    rules: DrawRules,
    keys: Tensor,
    positions: Tensor,
    tuning: DrawTuning = TUNED,
) -> Tensor:
    columns = _columns(drafts, *rules.columns, keys, positions)
    arguments = (draft_logits, draft_logits.stride(0), x.shape[1], *columns)
    return _draw(ACCEPT, "accept_or_replace", tuning, x, *arguments)


def _draw(source: Path, name: str, tuning: DrawTuning, x: Tensor, *arguments: Tensor | int) -> Tensor:
    n = x.shape[0]
    token_ids = torch.empty(n, dtype=torch.int64, device=x.device)
    if n > 0:
        shape = LaunchShape(n, tuning.threads, tuning.shared_bytes)
        cuda_source.kernel(source, name, **tuning.constants).launch(shape, x, x.stride(0), *arguments, token_ids)
    return token_ids


def _columns(*columns: Tensor) -> list[Tensor | int]:
    """Returns each column [n] and its stride."""
    return [argument for column in columns for argument in (column, column.stride(0))]


def leading(x: Tensor, count: int, tuning: DrawTuning = TUNED) -> Tensor:
    n, vocab = x.shape
    token_ids = torch.empty(n, count, dtype=torch.int64, device=x.device)
    if n == 0:
        return token_ids
    shared_bytes = tuning.shared_bytes + 8 * MAX_LEADING + 8  # the size of `Listed` in leading.cu
    constants = tuning.constants | {"SHARED_BYTES": shared_bytes, "MAX_COUNT": MAX_LEADING}
    kernel = cuda_source.kernel(LEADING, "leading", **constants)
    kernel.launch(LaunchShape(n, tuning.threads, shared_bytes), x, x.stride(0), vocab, count, token_ids)
    return token_ids
