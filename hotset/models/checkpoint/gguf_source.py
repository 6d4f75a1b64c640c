"""Reads GGUF files of the Llama family: metadata as a `ModelSpec`, tensors under their Hugging Face names.

GGUF files store the rows of the Q and K matrices in another order than Hugging Face checkpoints. In the latter, rope
rotates value `i` of a head together with value `i + d/2`; llama.cpp rotates neighbours, so its converter moves row
`half * d/2 + i` of each head to row `2 * i + half`. `load` undoes this permutation on the quantised rows, which
is possible because each row is quantised separately.
"""

import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy
import torch

from hotset.base.errors import CheckpointError, MissingDependency
from hotset.models.checkpoint.gguf_file import GgufFile, GgufTensor
from hotset.models.checkpoint.source import Progress, TensorSlice, check_shape, check_unused_tensors, copy_to, sliced
from hotset.models.config_reader import read_spec
from hotset.models.spec import GqaSpec, ModelSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

F32, F16 = 0, 1
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
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


def gguf_spec(file: GgufFile) -> ModelSpec:
    """Returns the spec of the model in the file. Raises `CheckpointError` for features that decoders do not support."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file.path}: general.architecture is {architecture!r}; supported in GGUF files: llama")
    if metadata.get("llama.expert_count"):
        raise CheckpointError(
            f"{file.path}: llama.expert_count is {metadata['llama.expert_count']}; supported: no experts"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    embedding = file.tensors.get(TOP_NAMES["model.embed_tokens.weight"])
    heads = metadata.get("llama.attention.head_count")
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": metadata.get("llama.vocab_size", len(tokens) if tokens else None),
        "hidden_size": metadata.get("llama.embedding_length"),
        "num_hidden_layers": metadata.get("llama.block_count"),
        "intermediate_size": metadata.get("llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length"),
        "rms_norm_eps": metadata.get("llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.get("llama.context_length"),
        "tie_word_embeddings": TOP_NAMES["lm_head.weight"] not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": {F32: "float32", F16: "float16"}.get(embedding.type_id if embedding else F32, "bfloat16"),
        "eos_token_id": list(gguf_eos_ids(file)) or None,
        "rope_parameters": _rope(file),
    }
    spec = read_spec(config, {}, str(file.path))
    rotated_dims = metadata.get("llama.rope.dimension_count", spec.rope.dim)
    if rotated_dims != spec.rope.dim:
        raise CheckpointError(f"{file.path}: llama.rope.dimension_count is {rotated_dims}; supported: {spec.rope.dim}")
    return spec


def gguf_eos_ids(file: GgufFile) -> tuple[int, ...]:
    """Returns the tokens that end a text or a turn of a chat."""
    ids = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _rope(file: GgufFile) -> dict[str, Any]:
    metadata = file.metadata
    rope: dict[str, Any] = {"rope_theta": metadata.get("llama.rope.freq_base", 10000.0)}
    kind = metadata.get("llama.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        return rope | _llama3_rope(file, rope["rope_theta"])
    if kind == "none":
        return rope
    return rope | {
        "rope_type": kind,
        "factor": metadata.get("llama.rope.scaling.factor"),
        "original_max_position_embeddings": metadata.get("llama.rope.scaling.original_context_length"),
        "attention_factor": metadata.get("llama.rope.scaling.attn_factor"),
    }


def _llama3_rope(file: GgufFile, theta: float) -> dict[str, Any]:
    """Recovers the parameters of Llama 3's scaled rope from the divisor of each frequency, which converters store.

    The largest divisor is the factor itself. The other parameters are the same in every Llama 3 model. A file with
    other parameters is refused, because these would give slightly wrong results.
    """
    tensor = file.tensors[ROPE_FACTORS]
    count = tensor.shape[0] if len(tensor.shape) == 1 and tensor.type_id == F32 else 0
    if not 0 < count * 4 <= len(file.mapped) - tensor.offset:
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS} is damaged or cut short")
    stored = numpy.frombuffer(file.mapped, dtype="<f4", count=count, offset=tensor.offset).astype(numpy.float64)
    factor = float(stored.max())
    turns = LLAMA3_ROPE["original_max_position_embeddings"] / (2 * numpy.pi * theta ** (numpy.arange(count) / count))
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    kept = numpy.clip((turns - low) / (high - low), 0.0, 1.0)
    # stored = 1 / (kept + (1 - kept) / factor), rearranged so that damaged numbers cannot cause a division by zero
    if factor < 1.0 or not numpy.allclose(stored * (kept * factor + 1.0 - kept), factor, rtol=1e-4):
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS} holds rope factors other than those of Llama 3")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


class GgufSource:
    """Dequantises each tensor when it is loaded."""

    def __init__(
        self,
        file: GgufFile,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        progress: Progress | None = None,
    ) -> None:
        assert isinstance(spec.attention, GqaSpec), "GGUF files of the llama family have grouped heads"
        self._attention = spec.attention
        self._spec = spec
        self._dtype = dtype
        self._device = torch.device(device)
        self._progress = progress
        self._file = file
        self._gguf = _import_gguf()
        self._loaded: set[str] = set()
        self._skipped: set[str] = set()  # loaded by other workers
        self._bytes_loaded = 0
        self._bytes_total = file.path.stat().st_size

    def load(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        out: torch.Tensor | None = None,
        tensor_slice: TensorSlice | None = None,
    ) -> torch.Tensor:
        stored_name = gguf_name(name)
        tensor = None if stored_name is None else self._file.tensors.get(stored_name)
        if tensor is None:
            raise CheckpointError(f"{self._file.path}: tensor {stored_name or name} is missing")
        check_shape(str(self._file.path), tensor.name, tensor.shape, shape)
        packed, kind = self._packed(tensor)
        heads = {"q_proj": self._attention.heads, "k_proj": self._attention.kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            packed = unpermute(packed, heads)
        values = self._dequantise(tensor, packed, kind)
        self._count(tensor.name, packed.nbytes)
        device = self._device if out is None else out.device
        return copy_to(out, sliced(values.view(shape), tensor_slice), self._dtype, device)

    def skip(self, name: str) -> None:
        stored_name = gguf_name(name)
        if stored_name is not None:
            self._skipped.add(stored_name)

    def finish(self) -> None:
        unused = self._file.tensors.keys() - self._loaded - self._skipped - {ROPE_FACTORS}
        check_unused_tensors(str(self._file.path), unused, self._spec)
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

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
        if columns % block or tensor.offset + count > self._bytes_total:
            raise CheckpointError(f"{where} reaches past the end of the file: damaged or cut short")
        raw = numpy.frombuffer(self._file.mapped, dtype=numpy.uint8, count=count, offset=tensor.offset)
        return raw.reshape(packed_shape), kind

    def _dequantise(self, tensor: GgufTensor, packed: "NDArray[Any]", kind: Any) -> torch.Tensor:
        try:
            values = self._gguf.quants.dequantize(packed, kind)
        except NotImplementedError as error:
            raise CheckpointError(f"{self._file.path}: tensor {tensor.name} is of type {kind.name}: {error}") from error
        # F32 values are a read-only view of the file, and torch requires writable arrays.
        return torch.from_numpy(numpy.require(values, requirements="W"))

    def _count(self, stored_name: str, packed_bytes: int) -> None:
        if stored_name not in self._loaded:
            self._loaded.add(stored_name)
            self._bytes_loaded += packed_bytes
        if self._progress is not None:
            self._progress(self._bytes_loaded, self._bytes_total)


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
