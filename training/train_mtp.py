"""Trains the MTP layer of models/demo-dsa on its frozen trunk, and adds it to the checkpoint.

    apt-get download python3.11-doc anarchism dict-gcide perl-doc bible-kjv-text fortunes
    python training/prepare.py FOLDER_WITH_THE_DEBS --tokenizer models/demo-dsa/tokenizer.json
    python training/train_mtp.py                       about 5 minutes on one H200

The layer learns the trunk's own distribution of the token after the next one (KL), not the text. First it attends to
all slots, while its indexer learns attention's distribution. Then it drafts: every iteration starts from the hidden
state of the iteration before it. Then it attends to its indexer's top-k, at growing lengths. A quarter of the sequences
is running text without records.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from export import add_mtp, trained_state
from model import DemoConfig, DemoModel, Moe
from mtp_model import Drafts, accepted_lengths, draft_loss
from numpy.typing import NDArray
from optimiser import Muon
from sequences import TEXT_WEIGHT, Lexicon, Writer
from torch import Tensor
from train import HELD_OUT_FILLER, TOKENS_PER_PUT, Feeder, TrainingStage

PLAIN_TEXT = 0.25  # the share of sequences that are running text only
CHAINS = 0.3  # the share of the other sequences with chains of updates
ANSWER_WEIGHT, TEXT_LOSS_WEIGHT, OTHER_WEIGHT = 1.0, 0.2, 0.02
DRAFTS = 3  # iterations that are evaluated


@dataclass(frozen=True)
class MtpStage:
    iterations: int
    sparse: bool
    length: int
    sequences: int  # per batch
    seconds: float
    rate: float  # Muon's learning rate at the start; AdamW's is a tenth of it
    last_rate: float

    @property
    def feeding(self) -> TrainingStage:
        return TrainingStage(
            "sparse", self.length, self.sequences, self.seconds, self.rate, self.last_rate, False, CHAINS
        )


STAGES = (
    MtpStage(1, False, 512, 64, 43, 0.02, 0.02),
    MtpStage(3, False, 1024, 32, 50, 0.02, 0.015),
    MtpStage(3, True, 1024, 32, 43, 0.015, 0.01),
    MtpStage(4, True, 2048, 16, 50, 0.01, 0.005),
    MtpStage(4, True, 4096, 8, 37, 0.005, 0.002),
    MtpStage(4, True, 2048, 16, 25, 0.002, 0.0002),
)
SMOKE = (
    MtpStage(1, False, 512, 64, 3, 0.02, 0.02),
    MtpStage(4, True, 2048, 16, 3, 0.02, 0.01),
    MtpStage(4, True, 4096, 8, 3, 0.01, 0.001),
)


def sequences(
    folder: Path, seed: int, length: int, *, evaluating: bool = False
) -> Iterator[tuple[list[int], list[float]]]:
    """Yields (tokens, weights) of questions and of running text, endlessly."""
    filler, lexicon, rng = np.load(folder / "filler.npy"), Lexicon.load(folder), np.random.default_rng(seed)
    border = int(len(filler) * (1 - HELD_OUT_FILLER))
    filler = filler[border:] if evaluating else filler[:border]
    writer = Writer(lexicon, filler, seed, CHAINS, evaluating)
    while True:
        if rng.random() < PLAIN_TEXT:
            start = int(rng.integers(len(filler) - length))
            text = filler[start : start + length - 1].tolist()
            yield [lexicon.bos, *text], [0.0, *[TEXT_WEIGHT] * (length - 1)]
        else:
            yield writer.write(length)


def feed(
    queue: "multiprocessing.Queue[tuple[NDArray[np.int16], NDArray[np.float16]]]",
    folder: Path,
    seed: int,
    stage: TrainingStage,
) -> None:
    source = sequences(folder, seed, stage.length)
    while True:
        written = [next(source) for _ in range(max(1, TOKENS_PER_PUT // stage.length))]
        tokens = np.array([tokens for tokens, _ in written], dtype=np.int16)
        queue.put((tokens, np.array([weights for _, weights in written], dtype=np.float16)))


class MtpTrainer:
    """Trains the layer on the device of the trunk."""

    def __init__(self, trunk: DemoModel) -> None:
        self.drafts = Drafts(trunk)
        self._device = trunk.embed_tokens.weight.device
        self.drafts.mtp.to(self._device).train()
        named = list(self.drafts.mtp.named_parameters())
        matrix = {name: p.dim() == 2 and not any(part in name for part in ("indexer", ".gate.")) for name, p in named}
        self._muon = Muon([p for name, p in named if matrix[name]])
        self._index = [p for name, p in named if "indexer" in name]
        self._main = [p for name, p in named if "indexer" not in name]
        groups = [
            {"params": [p for name, p in named if not matrix[name] and "indexer" not in name]},
            {"params": self._index},
        ]
        self._adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, tokens: Tensor, weights: Tensor, stage: MtpStage, rate: float) -> tuple[Tensor, Tensor]:
        """Makes one step of training. Returns the loss of drafts and of the indexer."""
        queries = torch.randint(tokens.shape[1] // 8, tokens.shape[1] - 2, (64,), device=self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            hidden, trunk_logits = self.drafts.trunk_states(tokens)
            predictions, index_loss = self.drafts(
                tokens, hidden, stage.iterations, sparse=stage.sparse, queries=queries
            )
        loss = draft_loss(predictions, trunk_logits, loss_weights(weights))
        self.drafts.mtp.zero_grad(set_to_none=True)
        (loss + index_loss).backward()
        torch.nn.utils.clip_grad_norm_(self._main, 1.0)
        torch.nn.utils.clip_grad_norm_(self._index, 1.0)
        self._adam.param_groups[0]["lr"] = rate / 10
        self._adam.param_groups[1]["lr"] = max(rate / 10, 2e-4)
        self._adam.step()
        self._muon.step(rate)
        return loss.detach(), index_loss.detach()

    def balance(self, rate: float) -> None:
        mlp = self.drafts.mtp.layer.mlp
        if isinstance(mlp, Moe):
            mlp.balance(rate)

    @torch.no_grad()
    def evaluate(self, source: Iterator[tuple[list[int], list[float]]], count: int) -> dict[str, float]:
        """Returns the mean accepted length of `DRAFTS` drafts that follow a token of an answer, or of running text."""
        self.drafts.mtp.eval()
        sums = dict.fromkeys(("answers", "text"), (0, 0))
        for _ in range(count):
            sequence, weights = next(source)
            tokens = torch.tensor([sequence], device=self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                hidden, trunk_logits = self.drafts.trunk_states(tokens)
                predictions, _ = self.drafts(tokens, hidden, DRAFTS, sparse=True, queries=None)
            lengths = accepted_lengths(predictions, trunk_logits)[0].cpu()
            drafted = torch.tensor(weights)[2 : 2 + len(lengths)]  # the weight of the first drafted token
            known = torch.tensor(weights)[1 : 1 + len(lengths)]  # and of the token before it
            for kind, chosen in (
                ("answers", (drafted == 1) & (known == 1)),
                ("text", (drafted > 0) & (drafted < 1) & (known > 0) & (known < 1)),
            ):
                total, number = sums[kind]
                sums[kind] = total + int(lengths[chosen].sum()), number + int(chosen.sum())
        self.drafts.mtp.train()
        return {kind: total / max(1, number) for kind, (total, number) in sums.items()}


def loss_weights(weights: Tensor) -> Tensor:
    """Returns the weight of each slot's prediction [b, n - 2], by the kind of the token that it predicts."""
    kinds = weights[:, 2:]
    text = torch.where(kinds > 0, TEXT_LOSS_WEIGHT, OTHER_WEIGHT)
    return torch.where(kinds == 1, torch.full_like(kinds, ANSWER_WEIGHT), text.to(kinds.dtype))


def load_trunk(model: Path, device: str) -> DemoModel:
    trunk = DemoModel(DemoConfig())
    trunk.load_state_dict(trained_state(model, trunk.config))
    return trunk.to(device)


def train(trainer: MtpTrainer, folder: Path, stages: tuple[MtpStage, ...], budget_s: float) -> list[dict[str, float]]:
    started, history = time.time(), []
    for number, stage in enumerate(stages):
        feeder = Feeder(folder, stage.feeding, seed=5000 + number, feed=feed)
        begun, count = time.time(), 0
        while time.time() - begun < stage.seconds and time.time() - started < budget_s:
            done = (time.time() - begun) / stage.seconds
            rate = stage.rate + (stage.last_rate - stage.rate) * done
            if number == 0:
                rate *= min(1.0, (count + 1) / 50)
            loss, index_loss = trainer.step(*feeder.next(), stage, rate)
            count += 1
            if count % 20 == 0:
                trainer.balance(1e-3 if rate > 0.004 else 2e-4)
            if count % 50 == 0:
                entry = {"stage": number, "elapsed_s": time.time() - started, "loss": loss.item()}
                history.append(entry | {"index_loss": index_loss.item()})
                print(f"stage {number} step {count} {entry['elapsed_s']:.0f} s  loss {loss.item():.4f}  "
                      f"index {index_loss.item():.3f}", flush=True)  # fmt: skip
        feeder.stop()
        accepted = trainer.evaluate(sequences(folder, 777, 1024, evaluating=True), 24)
        print(f"== stage {number}: {count} steps, {time.time() - started:.0f} s, accepted {accepted}", flush=True)
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=Path("training/build"), help="folder that prepare.py wrote")
    parser.add_argument("--model", type=Path, default=Path("models/demo-dsa"), help="checkpoint that gets the layer")
    parser.add_argument("--out", type=Path, default=Path("training/build"), help="folder for history and parameters")
    parser.add_argument("--budget", type=float, default=440, help="seconds after which training stops")
    parser.add_argument("--smoke", action="store_true", help="a few seconds per stage, and no export")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    trainer = MtpTrainer(load_trunk(options.model, "cuda"))
    history = train(trainer, options.build, SMOKE if options.smoke else STAGES, options.budget)
    results = {
        length: trainer.evaluate(sequences(options.build, 778, length, evaluating=True), 64 if length < 4096 else 24)
        for length in (1024, 4096)
    }
    print(f"accepted length by context: {results}", flush=True)
    (options.out / "mtp.json").write_text(json.dumps({"history": history, "results": results}, indent=1) + "\n")
    if not options.smoke:
        state = {name: tensor.detach().float().cpu() for name, tensor in trainer.drafts.mtp.state_dict().items()}
        torch.save(state, options.out / "mtp.pt")
        add_mtp(state, options.model)


if __name__ == "__main__":
    main()
