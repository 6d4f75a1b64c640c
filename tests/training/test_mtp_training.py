"""The recipe of the MTP layer, on a tiny model: the loss falls, chains read the same rows as drafting, and exports are
exact."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

DEMO = Path(__file__).parents[2] / "models" / "demo-dsa"
TRAINING = Path(__file__).parents[2] / "training"


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the scripts of the recipe import each other by name, and removes their modules, which have common names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(TRAINING))
    yield
    for name in set(sys.modules) - before:
        if str(TRAINING) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def tiny_config():
    from model import DemoConfig

    return DemoConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=6,
        intermediate_size=32,
        first_k_dense_replace=1,
        n_routed_experts=2,
        moe_intermediate_size=16,
        num_experts_per_tok=1,
    )


@pytest.mark.slow
def test_the_loss_of_drafts_falls():
    from model import DemoModel
    from train_mtp import MtpStage, MtpTrainer

    torch.manual_seed(1)
    trainer = MtpTrainer(DemoModel(tiny_config()))
    stage = MtpStage(3, True, 24, 4, 0.0, 0.02, 0.02)
    losses = []
    for _ in range(40):
        tokens = torch.randint(32, (4, 24))
        loss, _ = trainer.step(tokens, torch.ones(4, 24), stage, 0.02)
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_chain_of_the_recipe_computes_what_drafting_one_token_at_a_time_computes():
    from model import DemoModel, rotation
    from mtp_model import Drafts, SlotRows

    torch.manual_seed(2)
    drafts = Drafts(DemoModel(tiny_config())).double().eval()
    tokens = torch.randint(32, (1, 20))
    hidden, _ = drafts.trunk_states(tokens)
    predictions, _ = drafts(tokens, hidden, 3, sparse=True, queries=None)
    mtp, scale, rotary = drafts.mtp, 32**0.5, rotation(20, 8, 50000.0, tokens.device)

    def rows_of(chain: list[SlotRows], iteration: int, slot: int) -> SlotRows:
        rows = chain[iteration]
        return SlotRows(*(tensor[..., slot : slot + 1, :] for tensor in (rows.k, rows.v, rows.index_k)))

    whole: list[SlotRows] = []
    embedded = drafts.trunk.embed_tokens(tokens.roll(-1, dims=1)) * scale
    state, _ = mtp(embedded, hidden / scale, rotary, whole, sparse=True, queries=None)
    start = 12  # the chain begins after slot 12: all slots up to it are of iteration 1
    known = [rows_of(whole, 0, slot) for slot in range(start + 1)]
    carried = state[:, start : start + 1]
    for iteration in (1, 2):
        slot = start + iteration
        out, rows = _one_slot(mtp, embedded[:, slot : slot + 1], carried, rotary, slot, known)
        known.append(rows)
        logits = drafts.trunk.logits(mtp.norm(out))
        torch.testing.assert_close(predictions[iteration].logits[:, slot : slot + 1], logits)
        carried = out


def _one_slot(mtp, embedded: Tensor, hidden: Tensor, rotary, slot: int, known):
    """Computes one slot from the rows of all slots before it, without masks."""
    from model import Rotation
    from mtp_model import SlotRows

    here = Rotation(rotary.cos[slot : slot + 1], rotary.sin[slot : slot + 1])
    x = mtp.eh_proj(torch.cat((mtp.enorm(embedded), mtp.hnorm(hidden)), dim=-1))
    normed, attention = mtp.layer.input_layernorm(x), mtp.layer.self_attn
    q, k, v, latent = attention.qkv(normed, here)
    index_q, index_k, weights = attention.indexer.parts(normed, latent, here)
    rows = SlotRows(k, v, index_k)
    every = [*known, rows]
    scores = attention.indexer.scores(index_q, torch.cat([r.index_k for r in every], dim=1), weights)[0, 0]
    chosen = scores.topk(6).indices
    keys, values = (torch.cat([getattr(r, part) for r in every], dim=2)[:, :, chosen] for part in ("k", "v"))
    shares = (q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    x = x + attention.o_proj((shares @ values).transpose(1, 2).flatten(2))
    return x + mtp.layer.mlp(mtp.layer.post_attention_layernorm(x)), rows


def test_the_trunk_is_read_back_exactly():
    from export import checkpoint_tensors, trained_state
    from model import DemoConfig

    stored: dict[str, Tensor] = {}
    for path in DEMO.glob("model-0*.safetensors"):
        stored |= load_file(path)
    written = checkpoint_tensors(trained_state(DEMO, DemoConfig()), DemoConfig())
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name].float(), stored[name].float()) for name in stored)


def test_the_layer_is_added_to_a_checkpoint_once(tmp_path: Path):
    from export import MTP_FILE, add_mtp
    from model import DemoConfig
    from mtp_model import MtpLayer

    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    for path in DEMO.glob("model-0*.safetensors"):
        (tmp_path / path.name).symlink_to(path)
    state = dict(MtpLayer(DemoConfig()).state_dict())
    add_mtp(state, tmp_path)
    once = (tmp_path / "model.safetensors.index.json").read_bytes()
    add_mtp(state, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").read_bytes() == once
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    added = load_file(tmp_path / MTP_FILE)
    assert added["model.layers.6.eh_proj.weight"].shape == (256, 512)
    assert {"model.layers.6.shared_head.norm.weight", "model.layers.6.mlp.experts.7.up_proj.weight"} <= added.keys()
    assert {"model.layers.6.enorm.weight", "model.layers.6.self_attn.indexer.wk.weight"} <= added.keys()
