"""mla_append: this step's MLA rows, from the down-projection's output to their places on the device."""

from torch import Tensor

from hotset.base.errors import ConfigError
from hotset.kernels.fast_path import kernels_of, served_fast
from hotset.kernels.mla_append import reference
from hotset.kernels.rope.rotation import Rotation
from hotset.kernels.rows import RowLayout

MAX_FAST_RANK = 4096  # one program holds a row's latent in registers


def mla_append(
    kv: Tensor,  # [rows, rank + rope]: latent | rope key; rows may lie apart
    weight: Tensor,  # [rank]: of the RMS norm on latents
    eps: float,
    rotation: Rotation,  # of the rope key
    layout: RowLayout,
    device_rows: Tensor,  # [device rows, stored width]
    new_rows: Tensor,  # [rows] int64: where each row goes, all different; EMPTY: nowhere
) -> None:
    """Stores [normed latent | rope key turned], encoded by `layout`, into `device_rows`; nothing else is written.

    Pairs of the rope key are (2i, 2i + 1), written as two halves. Raises ConfigError before launch for a layout that
    the fast path cannot write.
    """
    rank = weight.shape[0]
    assert kv.shape[1] == layout.width == rank + rotation.dim, f"{kv.shape[1]} values for rows of {layout.width}"
    assert device_rows.shape[1] == layout.stored_width, f"device rows of {device_rows.shape[1]} values"
    if not served_fast(kv):
        reference.mla_append(kv, weight, eps, rotation, layout, device_rows, new_rows)
        return
    if layout.quantised not in (0, rank) or layout.quantised % 4:
        raise ConfigError(f"{layout.quantised} of {rank} latents in fp8: a GPU stores none or all, in multiples of 4")
    if rank > MAX_FAST_RANK:
        raise ConfigError(f"a latent of {rank} values is more than the {MAX_FAST_RANK} that a GPU appends")
    kernels_of("mla_append").mla_append(kv, weight, eps, rotation, layout, device_rows, new_rows)
