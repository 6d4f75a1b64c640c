"""Loads the tensors of Llama-family GGUF files under their Hugging Face names.

GGUF files store the rows of the Q and K matrices in another order than Hugging Face checkpoints. In the latter, rope
rotates value `i` of a head together with value `i + d/2`; llama.cpp rotates neighbours, so its converter moves row
`half * d/2 + i` of each head to row `2 * i + half`. `read` undoes this permutation on the quantised rows, which is
possible because each row is quantised separately.
"""

import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy
import torch

from hotset.base.errors import CheckpointError, MissingDependency
from hotset.kernels.weights import Weight
from hotset.models.checkpoint.gguf_file import GgufFile, GgufTensor
from hotset.models.checkpoint.gguf_spec import ROPE_FACTORS, TOP_NAMES
from hotset.models.checkpoint.stored_tensors import check_shape, check_unused_tensors, rows_of
from hotset.models.formats.weight_format import PLAIN, WeightFormat
from hotset.models.model_tensors import tensor_names
from hotset.models.spec import ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str) -> str | None:
    """Returns the name in GGUF files, such as blk.0.ffn_up.weight for model.layers.0.mlp.up_proj.weight, or None."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return TOP_NAMES.get(name)
    stored = LAYER_NAMES.get(layer[2])
    return None if stored is None else f"blk.{layer[1]}.{stored}.{layer[3]}"


class GgufSource:
    """Dequantises each tensor when it is read."""

    def __init__(self, file: GgufFile, spec: ModelSpec) -> None:
        self._attention = spec.attention
        self._spec = spec
        self._file = file
        self._gguf = _import_gguf()
        self._file_bytes = file.path.stat().st_size

    def format_of(self, name: str) -> WeightFormat:
        return PLAIN

    def announce(self, name: str, shape: tuple[int, ...], rows: range | None) -> None:
        """Does nothing: the file is mapped, and tensors are dequantised whole."""

    def read(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> Weight:
        tensor = self._tensor(name)
        check_shape(self.title(name), tensor.shape, shape)
        packed, kind = self._packed(tensor)
        heads = {"q_proj": self._attention.heads, "k_proj": self._attention.divided_kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            packed = unpermute(packed, heads)
        return rows_of(self._dequantise(tensor, packed, kind).view(shape), rows)

    def stored_bytes(self, name: str) -> int:
        return self._packed(self._tensor(name))[0].nbytes

    def title(self, name: str) -> str:
        return f"{self._file.path}: tensor {gguf_name(name)}"

    def finish(self) -> None:
        used = {gguf_name(name) for name in tensor_names(self._spec)}
        unused = self._file.tensors.keys() - used - {ROPE_FACTORS}
        check_unused_tensors(str(self._file.path), unused, self._spec)

    def _tensor(self, name: str) -> GgufTensor:
        stored_name = gguf_name(name)
        tensor = None if stored_name is None else self._file.tensors.get(stored_name)
        if tensor is None:
            raise CheckpointError(f"{self._file.path}: tensor {stored_name or name} is missing")
        return tensor

    def _packed(self, tensor: GgufTensor) -> tuple["NDArray[Any]", Any]:
        """Returns a view of the stored bytes, [rows, bytes of a row] or [bytes], and their number format."""
        where = f"{self._file.path}: tensor {tensor.name}"
        try:
            kind = self._gguf.GGMLQuantizationType(tensor.type_id)
            block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{where} is of type {tensor.type_id}, which the gguf package does not support"
            ) from error
        *rows, columns = tensor.shape
        packed_shape = (*rows, columns // block * block_bytes)
        count = int(numpy.prod(packed_shape))
        if columns % block or tensor.offset + count > self._file_bytes:
            raise CheckpointError(f"{where} reaches past the end of the file: damaged or cut short")
        raw = numpy.frombuffer(self._file.mapped, dtype=numpy.uint8, count=count, offset=tensor.offset)
        return raw.reshape(packed_shape), kind

    def _dequantise(self, tensor: GgufTensor, packed: "NDArray[Any]", kind: Any) -> torch.Tensor:
        try:
            with numpy.errstate(all="ignore"):  # values that are not finite are refused when they are copied
                values = self._gguf.quants.dequantize(packed, kind)
        except NotImplementedError as error:
            raise CheckpointError(f"{self._file.path}: tensor {tensor.name} is of type {kind.name}: {error}") from error
        # F32 values are a read-only view of the file, and torch requires writable arrays.
        return torch.from_numpy(numpy.require(values, requirements="W"))


def unpermute(rows: "NDArray[Any]", heads: int) -> "NDArray[Any]":
    """Undoes the converter's permutation of Q or K: moves row `2 * i + half` of each head to `half * d/2 + i`."""
    by_pair = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return numpy.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(rows.shape)


def _import_gguf() -> ModuleType:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise MissingDependency("GGUF files need the gguf package: pip install gguf") from error
    return gguf
