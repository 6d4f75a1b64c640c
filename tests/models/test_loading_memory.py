"""Loading copies tensors from the mapped files straight to their place, without temporary copies of whole tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import tiny_directory
from models.fp8_models import QUANTISATION
from safetensors.torch import save_file
from split_workers import on_ranks, parts_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotset.kernels.fp8 import Fp8Weight
from hotset.kernels.weights import Weight
from hotset.models.checkpoint import stored_tensors
from hotset.models.checkpoint.dummy_source import DummySource
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import WeightSource, open_weights
from hotset.models.decoder import Decoder
from hotset.models.formats.fp8_blocks import FP8_CHECKPOINT
from hotset.models.split import WHOLE_MODEL, Split

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}


class Storages(DummySource):
    """A source of random fp8 tensors that collects all of them, to write a checkpoint."""

    def __init__(self) -> None:
        super().__init__(CPU, 0, FP8_CHECKPOINT)
        self.tensors: dict[str, torch.Tensor] = {}

    def read(self, name: str, shape: tuple[int, ...], rows: range | None = None) -> Weight:
        assert rows is None, "the whole model is read"
        weight = super().read(name, shape)
        if isinstance(weight, Fp8Weight):
            self.tensors |= {name: weight.codes, f"{name}_scale_inv": weight.scales}
        else:
            assert isinstance(weight, torch.Tensor)
            self.tensors[name] = weight.to(torch.bfloat16)
        return weight


def save_checkpoint(folder: Path, **changes: Any) -> Path:
    """Writes an fp8 llama in four shards."""
    directory = Path(tiny_directory(folder, **SIZES | changes, quantization_config=QUANTISATION))
    collected = Storages()
    Decoder(find_model(str(directory)).spec, WeightSource(collected, torch.bfloat16, CPU, FP8_CHECKPOINT))
    names = sorted(collected.tensors)
    for shard in range(4):
        part = {name: collected.tensors[name] for name in names[shard::4]}
        save_file(part, directory / f"model-{shard + 1:05}-of-00004.safetensors")
    return directory


def is_mapped(address: int) -> bool:
    """Returns whether the address belongs to a mapped file of weights."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(".safetensors")
    return False


class NewTensors(TorchDispatchMode):
    """Keeps every tensor that an operation returns in more than `min_bytes` of new memory."""

    def __init__(self, min_bytes: int) -> None:
        super().__init__()
        self._min_bytes = min_bytes
        self.tensors: list[torch.Tensor] = []  # are kept alive, so that no address is used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().nbytes() <= self._min_bytes:
                continue
            if not is_mapped(tensor.untyped_storage().data_ptr()):
                self.tensors.append(tensor)
        return result


@pytest.mark.slow  # torch imports a lot for a dispatch mode
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_temporary_tensor_exceeds_two_pieces(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are 16 KiB here; the largest weight has 512 KiB."""
    piece = 16 << 10
    monkeypatch.setattr(stored_tensors, "PIECE_BYTES", piece)
    files = find_model(str(save_checkpoint(tmp_path)))
    splits = [Split(rank, ranks) for rank in range(ranks)] if ranks > 1 else [WHOLE_MODEL]

    def load(peers: Any) -> tuple[Decoder, NewTensors]:
        source = open_weights(files, torch.bfloat16, CPU)
        with NewTensors(min_bytes=2 * piece) as new:
            decoder = Decoder(files.spec, source, split=splits[peers.rank], collectives=peers)
        source.finish()
        return decoder, new

    for decoder, new in on_ranks(ranks, load):
        held = {part.untyped_storage().data_ptr() for part in parts_of(decoder) if isinstance(part, torch.Tensor)}
        assert any(tensor.untyped_storage().data_ptr() in held for tensor in new.tensors)
        temporary = [tensor for tensor in new.tensors if tensor.untyped_storage().data_ptr() not in held]
        assert not [(tuple(tensor.shape), tensor.dtype) for tensor in temporary]
