"""tiered_drafts.py measures what it says, at a small size and on a CPU."""

import argparse

import pytest
import serving
import tiered_drafts
import torch
from speculation import DRAFTS
from test_one_rank import small_config
from tiered_drafts import Modes, measure_all

from hotset.models.decoder import Decoder
from hotset.models.families import read_spec
from hotset.models.spec import KvStorage

CPU = torch.device("cpu")
CONTEXT = 512


def test_tiers_and_drafts_decode_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CHUNK": 256, "SEATS": 8, "ANSWER": 128, "WARM_UP_STEPS": 2}.items():
        monkeypatch.setattr(tiered_drafts, name, value)
    spec = read_spec(small_config(128) | {"num_nextn_predict_layers": 1}, {}, "small", with_mtp=True)
    weights = serving.CountedWeights(torch.float32, CPU)
    decoder = Decoder(spec, weights, KvStorage(fp8_rows=True, fp8_keys=True))
    options = argparse.Namespace(contexts=[CONTEXT], device_gib=0.0013, host_gib=0.004, tokens=8, seconds=20.0)
    modes = Modes(decoder, options, CPU)
    off, off_drafts, tiered, tiered_drafting = measure_all(modes, [CONTEXT])
    modes.close()
    assert [row["drafts"] for row in (off, off_drafts, tiered, tiered_drafting)] == [0, DRAFTS, 0, DRAFTS]
    assert off["requests"] == off_drafts["requests"] < tiered_drafting["requests"] <= tiered["requests"]
    assert off["per step"] == tiered["per step"] == 1 < min(off_drafts["per step"], tiered_drafting["per step"])
    assert off["rows/token"] == off_drafts["rows/token"] == 0 < min(tiered["rows/token"], tiered_drafting["rows/token"])
    assert off["of off"] == 1
