"""Writes trained parameters as a deepseek_v32 checkpoint that Hotset and transformers can load.

python training/export.py CHECKPOINT_FOLDER [--out models/demo-dsa]
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from model import DemoConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 14_000_000
MTP_FILE = "model-mtp.safetensors"
IN_FP32 = ("e_score_correction_bias", "indexer.weights_proj.weight")


def checkpoint_tensors(state: dict[str, Tensor], config: DemoConfig) -> dict[str, Tensor]:
    """Returns the trained parameters with the names and shapes of the checkpoint format."""
    scale = config.hidden_size**0.5  # a power of two, so folding it into the weights is exact
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        target = f"model.{name}"
        if name == "embed_tokens.weight":
            value = value * scale
        elif name == "norm.weight":
            value = value / scale
        elif name.endswith((".mlp.gate_up", ".mlp.down")):
            tensors |= _experts(target.rpartition(".")[0], name.rpartition(".")[2], value, config)
            continue
        elif name.endswith(".mlp.correction"):
            target = target.replace(".correction", ".gate.e_score_correction_bias")
        elif name.endswith(".mlp.load"):
            continue
        tensors[target] = value
    return tensors


def _experts(prefix: str, part: str, value: Tensor, config: DemoConfig) -> dict[str, Tensor]:
    width, tensors = config.moe_intermediate_size, {}
    for expert in range(config.n_routed_experts):
        name = f"{prefix}.experts.{expert}"
        if part == "down":
            tensors[f"{name}.down_proj.weight"] = value[expert * width : (expert + 1) * width].T
        else:
            gate, up = value[2 * expert * width : 2 * (expert + 1) * width].split(width)
            tensors[f"{name}.gate_proj.weight"], tensors[f"{name}.up_proj.weight"] = gate, up
    return tensors


def trained_state(folder: Path, config: DemoConfig) -> dict[str, Tensor]:
    """Reads a checkpoint that `write` wrote, and returns the parameters of the trunk for `DemoModel`."""
    stored: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-0*.safetensors")):
        stored |= {name: tensor.float() for name, tensor in load_file(path).items()}
    scale, state = config.hidden_size**0.5, {}
    for name, value in stored.items():
        if ".experts." not in name:
            state[name.removeprefix("model.").replace(".gate.e_score_correction_bias", ".correction")] = value
    state["embed_tokens.weight"] /= scale
    state["norm.weight"] *= scale
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        prefix = f"layers.{layer}.mlp"
        parts = [f"model.{prefix}.experts.{expert}" for expert in range(config.n_routed_experts)]
        gate_up = [stored[f"{part}.{half}_proj.weight"] for part in parts for half in ("gate", "up")]
        state[f"{prefix}.gate_up"] = torch.cat(gate_up)
        state[f"{prefix}.down"] = torch.cat([stored[f"{part}.down_proj.weight"].T for part in parts])
        state[f"{prefix}.load"] = torch.zeros(config.n_routed_experts)
    return state


def mtp_tensors(state: dict[str, Tensor], config: DemoConfig) -> dict[str, Tensor]:
    """Returns the parameters of an `MtpLayer` with the names and shapes of the checkpoint format."""
    number = config.num_hidden_layers
    renamed = {}
    for name, value in state.items():
        if name == "norm.weight":  # like the trunk's last norm
            renamed[f"layers.{number}.shared_head.norm.weight"] = value / config.hidden_size**0.5
        else:
            renamed[f"layers.{number}.{name.removeprefix('layer.')}"] = value
    return checkpoint_tensors(renamed, config)


def add_mtp(state: dict[str, Tensor], folder: Path) -> None:
    """Adds the MTP layer to the checkpoint in `folder`: its own file, its entries in the index, and a field of
    config.json."""
    tensors = {name: _stored(name, tensor) for name, tensor in mtp_tensors(state, DemoConfig()).items()}
    save_file(tensors, folder / MTP_FILE, metadata={"format": "pt"})
    index_path, config_path = folder / "model.safetensors.index.json", folder / "config.json"
    index, config = json.loads(index_path.read_text()), json.loads(config_path.read_text())
    weight_map = {name: file for name, file in index["weight_map"].items() if file != MTP_FILE}
    index["weight_map"] = dict(sorted((weight_map | dict.fromkeys(tensors, MTP_FILE)).items()))
    shards = [load_file(folder / file) for file in sorted(set(index["weight_map"].values()))]
    index["metadata"]["total_size"] = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index_path.write_text(json.dumps(index, indent=1) + "\n")
    config_path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2) + "\n")


def _stored(name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor in bf16, or in fp32 if the architecture keeps it in fp32."""
    return tensor.contiguous().to(torch.float32 if name.endswith(IN_FP32) else torch.bfloat16)


def write(tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes shards and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name in sorted(tensors):
        tensor = _stored(name, tensors[name])
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    file_of, total = {}, 0
    for old in folder.glob("model-*.safetensors"):
        old.unlink()
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("checkpoint", type=Path)
    arguments.add_argument("--out", type=Path, default=Path("models/demo-dsa"))
    options = arguments.parse_args()
    state: dict[str, Tensor] = {}
    for path in sorted(options.checkpoint.glob("part*.pt")):
        state |= torch.load(path, map_location="cpu")
    config = DemoConfig()
    options.out.mkdir(parents=True, exist_ok=True)
    write(checkpoint_tensors(state, config), options.out)
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    (options.out / "config.json").write_text(json.dumps(config.to_json() | ids, indent=2) + "\n")
    (options.out / "generation_config.json").write_text(json.dumps({**ids, "temperature": 0.0}, indent=2) + "\n")
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": config.max_position_embeddings,
        "chat_template": template,
    }
    shutil.copyfile(options.checkpoint.parent / "tokenizer.json", options.out / "tokenizer.json")
    (options.out / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")


if __name__ == "__main__":
    main()
