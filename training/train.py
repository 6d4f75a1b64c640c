"""Trains the demo model on one GPU, in legs of at most 9 minutes that resume from a local checkpoint.

    python training/prepare.py FOLDER_WITH_DEBS        once, on any machine: tokenizer, words, filler
    python training/train.py --leg all                 21 minutes; or leg by leg:
    python training/train.py --leg 1                   look-up heads form, the indexer learns, selection up to 4k
    python training/train.py --leg 2                   selection up to 16k
    python training/train.py --leg 3                   keys with three or four values, at all lengths
    python training/export.py training/build/checkpoint

Leg 1 first trains dense attention at 256 and 1024 tokens. Then come the two stages of DSA training, at a small scale.
In the warm-up, the indexer learns attention's distribution by KL while attention stays dense. In sparse training, every
layer attends to the indexer's top-k. Leg 2 continues sparse training with longer contexts. Leg 3 repeats both stages
with data in which many keys change their value several times.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from model import DemoConfig, DemoModel, Moe
from optimiser import Muon
from sequences import Lexicon, Writer, batches
from torch import Tensor
from torch.nn import functional as F

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FEEDERS = 13  # processes that write sequences
TOKENS_PER_PUT = 16384  # tokens that a feeder puts into the queue at once
HELD_OUT_FILLER = 0.1  # the last tenth of the filler is for evaluation
EVALUATED_CHAINS = 0.5  # the share of evaluated sequences with chains of updates
PART_BYTES = 11_000_000  # about the size of each file of a saved checkpoint


@dataclass(frozen=True)
class TrainingStage:
    mode: str  # 'dense', 'warm_up', 'sparse'
    length: int
    sequences: int  # per batch
    seconds: float
    rate: float  # Muon's learning rate at the start; AdamW's is a tenth of it, or more for indexers
    last_rate: float  # Muon's learning rate at the end
    compiled: bool = False
    chains: float = 0.0  # the share of sequences with chains of updates


LEGS = {
    "1": (
        TrainingStage("dense", 256, 256, 50, 0.02, 0.02, compiled=True),
        TrainingStage("dense", 1024, 64, 40, 0.02, 0.01, compiled=True),
        TrainingStage("warm_up", 1024, 64, 40, 0.01, 0.01),
        TrainingStage("sparse", 1024, 64, 50, 0.01, 0.01),
        TrainingStage("sparse", 2048, 32, 90, 0.01, 0.007),
        TrainingStage("sparse", 4096, 16, 90, 0.007, 0.005),
    ),
    "2": (
        TrainingStage("sparse", 4096, 16, 60, 0.005, 0.004),
        TrainingStage("sparse", 8192, 8, 110, 0.004, 0.003),
        TrainingStage("sparse", 16384, 4, 150, 0.003, 0.002),
        TrainingStage("sparse", 4096, 16, 60, 0.002, 0.0002),
    ),
    "3": (
        TrainingStage("warm_up", 1024, 64, 40, 0.006, 0.005, chains=0.5),
        TrainingStage("warm_up", 4096, 16, 40, 0.005, 0.004, chains=0.5),
        TrainingStage("warm_up", 16384, 4, 40, 0.004, 0.004, chains=0.5),
        TrainingStage("sparse", 16384, 4, 60, 0.004, 0.003, chains=0.5),
        TrainingStage("sparse", 8192, 8, 40, 0.003, 0.002, chains=0.5),
        TrainingStage("sparse", 1024, 64, 25, 0.002, 0.002, chains=0.5),
        TrainingStage("sparse", 2048, 32, 30, 0.002, 0.001, chains=0.5),
        TrainingStage("sparse", 4096, 16, 50, 0.001, 0.0002, chains=0.5),
    ),
    "smoke": (
        TrainingStage("dense", 256, 64, 3, 0.02, 0.02),
        TrainingStage("warm_up", 512, 32, 3, 0.01, 0.01),
        TrainingStage("sparse", 1024, 16, 3, 0.01, 0.01),
        TrainingStage("sparse", 16384, 4, 3, 0.01, 0.01),  # the longest context, to check that memory suffices
    ),
}


def feed_questions(
    queue: "multiprocessing.Queue[tuple[np.ndarray, np.ndarray]]", folder: Path, seed: int, stage: TrainingStage
) -> None:
    filler = np.load(folder / "filler.npy")
    writer = Writer(Lexicon.load(folder), filler[: int(len(filler) * (1 - HELD_OUT_FILLER))], seed, stage.chains)
    for batch in batches(writer, max(1, TOKENS_PER_PUT // stage.length), stage.length):
        queue.put(batch)


class Feeder:
    """Starts processes that write sequences with `feed`, and returns batches of them on the GPU."""

    def __init__(
        self, folder: Path, stage: TrainingStage, seed: int, feed: Callable[..., None] = feed_questions
    ) -> None:
        self._queue: multiprocessing.Queue[tuple[np.ndarray, np.ndarray]] = multiprocessing.Queue(48)
        self._puts_per_batch = max(1, stage.sequences * stage.length // max(TOKENS_PER_PUT, stage.length))
        arguments = [(self._queue, folder, seed * 100 + number, stage) for number in range(FEEDERS)]
        self._workers = [
            multiprocessing.Process(target=feed, args=feed_arguments, daemon=True) for feed_arguments in arguments
        ]
        for worker in self._workers:
            worker.start()

    def next(self) -> tuple[Tensor, Tensor]:
        puts = [self._queue.get() for _ in range(self._puts_per_batch)]
        tokens = torch.from_numpy(np.concatenate([tokens for tokens, _ in puts])).cuda().long()
        return tokens, torch.from_numpy(np.concatenate([weights for _, weights in puts])).cuda().float()

    def stop(self) -> None:
        for worker in self._workers:
            worker.terminate()


class Trainer:
    def __init__(self, folder: Path, leg: str, budget_s: float) -> None:
        self._folder, self._leg, self._budget_s = folder, leg, budget_s
        self._checkpoint = folder / "checkpoint"
        self._started = time.time()
        self._steps = 0
        self.history: list[dict[str, float | str]] = []
        torch.manual_seed(0)
        self.model = DemoModel(DemoConfig()).cuda()
        if leg in ("2", "3"):
            self._resume()
        named = list(self.model.named_parameters())
        is_matrix = {
            name: p.dim() == 2 and not any(part in name for part in ("embed", "indexer", ".gate.")) for name, p in named
        }
        self._index = [p for name, p in named if "indexer" in name]
        self._matrices = [p for name, p in named if is_matrix[name]]
        self._others = [p for name, p in named if not is_matrix[name] and "indexer" not in name]
        self._muon = Muon(self._matrices)
        groups = [{"params": self._others}, {"params": self._index}]
        self._adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    @property
    def elapsed_s(self) -> float:
        return time.time() - self._started

    def run(self, number: int, stage: TrainingStage) -> None:
        """Trains one stage until `stage.seconds` or the leg's budget are used up.

        The seconds do not include the first three steps of the stage, which may compile.
        """
        feeder = Feeder(self._folder, stage, seed=number + {"2": 1000, "3": 2000}.get(self._leg, 0))
        losses = torch.compile(self._losses, dynamic=False) if stage.compiled else self._losses
        self.model.train()
        started, count = 0.0, 0
        while self.elapsed_s < self._budget_s and (started == 0.0 or time.time() - started < stage.seconds):
            done = 0.0 if started == 0.0 else (time.time() - started) / stage.seconds
            rate = stage.rate + (stage.last_rate - stage.rate) * done
            if number == 0:
                rate *= min(1.0, (count + 1) / 50)
            tokens, weights = feeder.next()
            queries = torch.randint(stage.length // 8, stage.length, (64,), device="cuda")
            loss, index_loss, answer_loss, right = losses(tokens, weights, stage.mode, queries)
            self._step(loss + index_loss, rate)
            if count % 20 == 0:
                for layer in self.model.layers:
                    if isinstance(layer.mlp, Moe):
                        layer.mlp.balance(1e-3 if rate > 0.004 else 2e-4)
            count += 1
            if count == 3:
                torch.cuda.synchronize()
                started = time.time()
            if count % 50 == 0 or count == 3:
                self._log(stage, answer_loss.item(), float(index_loss), right.item())
        feeder.stop()
        print(f"== {stage.mode} {stage.length}: {count} steps, {self.elapsed_s:.0f} s in all", flush=True)

    def _losses(
        self, tokens: Tensor, weights: Tensor, mode: str, queries: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the weighted loss, the indexers' loss, the answers' loss, and the share of correct answer tokens."""
        with torch.autocast("cuda", torch.bfloat16):
            hidden, index_loss = self.model(tokens, mode, queries)
            logits = self.model.logits(hidden[:, :-1])
        losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        losses, weights = losses.view(tokens.shape[0], -1), weights[:, 1:]
        answer = (weights == 1).float()
        right = (logits.argmax(-1) == tokens[:, 1:]).float() * answer
        answer_loss = (losses * answer).sum() / answer.sum()
        return (losses * weights).sum() / weights.sum(), index_loss, answer_loss, right.sum() / answer.sum()

    def _step(self, loss: Tensor, rate: float) -> None:
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._matrices + self._others, 1.0)
        torch.nn.utils.clip_grad_norm_(self._index, 1.0)
        self._adam.param_groups[0]["lr"] = rate / 10
        self._adam.param_groups[1]["lr"] = max(rate / 10, 2e-4 if rate < 0.002 else 1e-3)
        self._adam.step()
        self._muon.step(rate)
        self._steps += 1

    def _log(self, stage: TrainingStage, loss: float, index_loss: float, right: float) -> None:
        entry = {"step": self._steps, "elapsed_s": self.elapsed_s, **asdict(stage), "loss": loss, "right": right}
        self.history.append(entry | {"index_loss": index_loss})
        print(
            f"{stage.mode:8} {stage.length:6} step {self._steps:5} {self.elapsed_s:6.0f} s  answer loss {loss:.4f}  "
            f"right {right:.4f}  index {index_loss:.3f}",
            flush=True,
        )

    @torch.no_grad()
    def evaluate(self, length: int, sequences: int) -> dict[str, tuple[int, int]]:
        """Returns the numbers of correct answers and of questions, by kind of question.

        Attention is sparse; keys and filler are held out. Answers are teacher-forced: all tokens of an answer are
        predicted correctly if and only if greedy decoding would produce the answer.
        """
        filler = np.load(self._folder / "filler.npy")
        lexicon = Lexicon.load(self._folder)
        held_out = filler[int(len(filler) * (1 - HELD_OUT_FILLER)) :]
        writer = Writer(lexicon, held_out, 987654 + length, EVALUATED_CHAINS, evaluating=True)
        kinds = {lexicon.marks[kind][0]: kind for kind in ("recall", "list", "chain", "copy", "sum")}
        counts: dict[str, tuple[int, int]] = {}
        self.model.eval()
        for _ in range(sequences):
            tokens, weights = writer.write(length)
            with torch.autocast("cuda", torch.bfloat16):
                hidden, _ = self.model(torch.tensor([tokens], device="cuda"), "sparse", None)
                guesses = self.model.logits(hidden)[0].argmax(-1).tolist()
            kind, right = "", True
            for position in range(1, length):
                if weights[position] == 1.0:
                    right &= guesses[position - 1] == tokens[position]
                    if tokens[position] == lexicon.end:
                        before = counts.get(kind, (0, 0))
                        counts[kind] = before[0] + right, before[1] + 1
                        right = True
                elif weights[position] == 0.0 and tokens[position] in kinds:
                    kind, right = kinds[tokens[position]], True
        summary = {kind: f"{right / asked:.3f} of {asked}" for kind, (right, asked) in sorted(counts.items())}
        print(f"eval {length:6}: {summary}", flush=True)
        return counts

    def save(self) -> None:
        """Writes the parameters to several small files, which are easy to copy between machines."""
        self._checkpoint.mkdir(parents=True, exist_ok=True)
        part: dict[str, Tensor] = {}
        number = 0
        state = {name: tensor.detach().float().cpu() for name, tensor in self.model.state_dict().items()}
        for name in sorted(state):
            part[name] = state[name]
            if sum(tensor.nbytes for tensor in part.values()) > PART_BYTES:
                torch.save(part, self._checkpoint / f"part{number}.pt")
                part, number = {}, number + 1
        torch.save(part, self._checkpoint / f"part{number}.pt")

    def _resume(self) -> None:
        state: dict[str, Tensor] = {}
        for path in sorted(self._checkpoint.glob("part*.pt")):
            state |= torch.load(path, map_location="cuda")
        if not state:
            raise SystemExit(f"error: {self._checkpoint} holds no checkpoint; run --leg 1 first")
        self.model.load_state_dict(state)


def plot(history: list[dict[str, float | str]], path: Path) -> None:
    """Plots answer loss and accuracy over time, with one colour per mode and length."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for stage in dict.fromkeys((entry["mode"], entry["length"]) for entry in history):
        points = [entry for entry in history if (entry["mode"], entry["length"]) == stage]
        seconds = [entry["elapsed_s"] for entry in points]
        left.semilogy(seconds, [entry["loss"] for entry in points], label=f"{stage[0]} {stage[1]}")
        right.plot(seconds, [entry["right"] for entry in points], label=f"{stage[0]} {stage[1]}")
    left.set(xlabel="seconds", ylabel="loss of answer tokens")
    right.set(xlabel="seconds", ylabel="answer tokens right")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def run_leg(leg: str, build: Path, out: Path, budget_s: float) -> None:
    """Trains, saves the checkpoint, evaluates, and writes history, plot and results to `out`."""
    trainer = Trainer(build, leg, budget_s)
    for number, stage in enumerate(LEGS[leg]):
        trainer.run(number, stage)
    trainer.save()
    plot(trainer.history, out / f"leg-{leg}.png")
    lengths = (1024, 2048, 4096, 8192, 16384) if leg != "smoke" else (1024,)
    results = {length: trainer.evaluate(length, 48 if length <= 4096 else 12) for length in lengths}
    record = {"history": trainer.history, "results": results}
    (out / f"leg-{leg}.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leg", choices=["all", *LEGS], required=True)
    parser.add_argument("--build", type=Path, default=Path("training/build"), help="folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, default=Path("training/build"), help="folder for history, plot and results")
    parser.add_argument("--budget", type=float, default=440, help="seconds after which a leg stops training")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for leg in ("1", "2", "3") if options.leg == "all" else (options.leg,):
        run_leg(leg, options.build, options.out, options.budget)


if __name__ == "__main__":
    main()
