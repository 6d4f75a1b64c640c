"""mla_append: computes this step's MLA rows from the output of the down-projection and writes them to the device."""

from torch import Tensor

from hotset.base.errors import ConfigError, InternalError
from hotset.kernels.fast_path import has_fast_path, kernels_of
from hotset.kernels.mla_append import reference
from hotset.kernels.rope import Rotation
from hotset.kernels.rows import RowLayout

MAX_FAST_RANK = 4096  # one program holds the latent of a row in registers


def mla_append(
    kv: Tensor,  # [tokens, rank + rope]: latent | rope key; tokens may have any stride
    weight: Tensor,  # [rank], of the RMS norm of latents
    eps: float,
    rotation: Rotation,  # of the rope key
    layout: RowLayout,
    device_rows: Tensor,  # [device rows, stored width]
    new_rows: Tensor,  # [tokens] int64: the device row of each token, all different; EMPTY: the row is not stored
) -> None:
    """Writes [normalised latent | rotated rope key], encoded by `layout`, into `device_rows`. Writes nothing else.

    The rotated pairs of the rope key are (2i, 2i + 1). The result has the first values of all pairs, then the second
    values. Raises ConfigError before launch if the fast path does not support the layout or the rank.
    """
    rank = weight.shape[0]
    if not kv.shape[1] == layout.width == rank + rotation.dim:
        raise InternalError(
            f"kv has {kv.shape[1]} values, rows have {layout.width}, latent and rope key have {rank} + {rotation.dim}"
        )
    if device_rows.shape[1] != layout.stored_width:
        raise InternalError(
            f"device rows have {device_rows.shape[1]} stored values, but the layout has {layout.stored_width}"
        )
    if not has_fast_path(kv):
        reference.mla_append(kv, weight, eps, rotation, layout, device_rows, new_rows)
        return
    if layout.quantised not in (0, rank) or layout.quantised % 4:
        raise ConfigError(
            f"{layout.quantised} of {rank} latents are in fp8, "
            "but on a GPU none or all of them must be in fp8, and their number must be a multiple of 4"
        )
    if rank > MAX_FAST_RANK:
        raise ConfigError(f"a latent has {rank} values; on a GPU, at most {MAX_FAST_RANK} are supported")
    kernels_of("mla_append").mla_append(kv, weight, eps, rotation, layout, device_rows, new_rows)
