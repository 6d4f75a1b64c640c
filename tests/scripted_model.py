"""A model that answers with scripts, for tests of answers that no small model would give.

It is a checkpoint like any other. Attention and feed-forward layers are zero, so the next token depends on the current
token alone: the output matrix maps each token of a script to the token after it. The chat template chooses the script:
it ends the prompt with the token that begins the script.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
import torch
from byte_level import BYTES, byte_level
from safetensors.torch import save_file

END = "<|end|>"
# Messages are rendered as they are. The last message of the user or of a tool chooses the script. The result of a tool
# chooses `result`. A message of the user chooses the first script whose name is in the text.
TEMPLATE = """
{%- if tools %}{% for tool in tools %}tool {{ tool | tojson }}\\n{% endfor %}{% endif -%}
{%- for message in messages -%}
{{ message.role }}: {{ message.content }}
{%- if message.reasoning_content %} <think>{{ message.reasoning_content }}</think>{% endif -%}
{%- for call in message.tool_calls or [] %} <tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
{{ '<|end|>' }}
{%- endfor -%}
{%- set last = messages | selectattr('role', 'in', ['user', 'tool']) | list | last -%}
{%- set chosen = namespace(name='result' if last.role == 'tool' else '') -%}
{%- for name in NAMES -%}
{%- if not chosen.name and name in last.content %}{% set chosen.name = name %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|' ~ (chosen.name or 'other') ~ '|>' }}{% endif -%}
"""


def write_scripted_model(directory: Path, scripts: Mapping[str, Sequence[str]]) -> str:
    """Writes a checkpoint and returns its path. A script is a list of tokens; no token may be in a script twice, or in
    two scripts. There must be scripts with the names `result`, for the results of tools, and `other`."""
    assert {"result", "other"} <= scripts.keys()
    pieces = [piece for script in scripts.values() for piece in script]
    added = [END, *(f"<|{name}|>" for name in scripts), *pieces]
    assert len({*BYTES, *added}) == len(BYTES) + len(added), "each token may be used once, and must be long"
    tokenizer = byte_level()
    tokenizer.add_special_tokens(added[: 1 + len(scripts)])
    tokenizer.add_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in pieces])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in added}
    names = [name for name in scripts if name not in ("result", "other")]
    template = TEMPLATE.replace("NAMES", json.dumps(names))
    settings = {"eos_token": END, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab = len(BYTES) + len(added)
    config = _config(vocab, eos=ids[END])
    (directory / "config.json").write_text(json.dumps(config))
    next_ids = torch.full((vocab,), ids[END])
    for name, script in scripts.items():
        chain = [ids[f"<|{name}|>"], *(ids[piece] for piece in script), ids[END]]
        next_ids[chain[:-1]] = torch.tensor(chain[1:])
    save_file(_weights(config, next_ids), directory / "model.safetensors")
    return str(directory)


def _config(vocab: int, eos: int) -> dict[str, object]:
    hidden = (vocab + 31) // 32 * 32
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": eos,
    }


def _weights(config: Mapping[str, object], next_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Token t is the unit vector t. The logit of token n after it is large if n is the next token, else zero."""
    vocab, hidden = next_ids.numel(), int(str(config["hidden_size"]))
    embedding, head = torch.zeros(vocab, hidden), torch.zeros(vocab, hidden)
    tokens = torch.arange(vocab)
    embedding[tokens, tokens] = 1.0
    head[next_ids, tokens] = 10.0  # the norm multiplies it by the root of `hidden`
    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden),
        f"{layer}.input_layernorm.weight": torch.ones(hidden),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        **{f"{layer}.self_attn.{name}_proj.weight": torch.zeros(16, hidden) for name in "qkv"},
        f"{layer}.self_attn.o_proj.weight": torch.zeros(hidden, 16),
        f"{layer}.mlp.gate_proj.weight": torch.zeros(32, hidden),
        f"{layer}.mlp.up_proj.weight": torch.zeros(32, hidden),
        f"{layer}.mlp.down_proj.weight": torch.zeros(hidden, 32),
    }
