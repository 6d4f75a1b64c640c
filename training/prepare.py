"""Makes the tokenizer, the word list and the filler tokens for training from Debian's text packages.

    apt-get download python3.11-doc anarchism dict-gcide perl-doc bible-kjv-text fortunes
    python training/prepare.py FOLDER_WITH_THE_DEBS

The packages are not installed. The script writes tokenizer.json (a byte-level BPE of 4096 entries) and filler.npy
(uint16 tokens of running text) to training/build. It also writes hotset/lab/evaluate/words.txt, the word list that
training and evaluation share. Each of these words is one token. With `--tokenizer models/demo-dsa/tokenizer.json`, the
script uses this tokenizer and writes no word list, for training an MTP layer of the existing model.
"""

import argparse
import gzip
import html
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from sequences import WORDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
SPECIAL = ["<|bos|>", "<|end|>", "<|pad|>"]
MAX_CHARACTERS = 12_000_000  # per package, so that no package dominates; the last text may exceed this
FILLER_TOKENS = 5_000_000
COMMON_WORDS = 100  # this many of the most common words are used in running text only
NOT_TEXT = (".png", ".dat", ".js", ".css", ".index", ".inv", ".ico", ".svg", ".gif", ".jpg", ".pdf", ".u8", ".gz")


def texts(folder: Path) -> Iterator[str]:
    """Yields the text of every file with more than 2000 characters, as plain ASCII without markup."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        raw, name = path.read_bytes(), path.name
        if name.endswith((".gz", ".dz")):
            try:
                raw, name = gzip.decompress(raw), name.rpartition(".")[0]
            except OSError:
                continue
        if name.endswith(NOT_TEXT) or b"\0" in raw[:2000]:
            continue
        text = raw.decode("utf-8", "ignore")
        if name.endswith((".html", ".htm")):
            text = re.sub(r"(?s)<(script|style|head).*?</\1>", " ", text)
            text = html.unescape(re.sub(r"<[^>]+>", " ", text))
        text = re.sub(r"[ \t]+", " ", re.sub(r"[^\x20-\x7e\n]", " ", text))
        text = re.sub(r"\n\s*\n+", "\n", text)
        if len(text) > 2000:
            yield text


def collect(debs: Path) -> list[str]:
    documents: list[str] = []
    for deb in sorted(debs.glob("*.deb")):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg", "-x", str(deb), folder], check=True)
            characters = 0
            for text in texts(Path(folder)):
                if characters > MAX_CHARACTERS:
                    break
                documents.append(text)
                characters += len(text)
        print(f"{deb.name}: {characters:,} characters", flush=True)
    return documents


def train_tokenizer(documents: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = [text[start : start + 4000] for text in documents for start in range(0, len(text), 40000)]
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def single_token_words(documents: list[str], tokenizer: Tokenizer) -> list[str]:
    """Returns words of 3 to 9 letters that are one token with their leading space, most common first."""
    counts: Counter[str] = Counter()
    for text in documents:
        counts.update(re.findall(r"(?<= )[a-z]{3,9}(?= )", text))
    vocabulary = tokenizer.get_vocab()
    return [word for word, _ in counts.most_common(20000) if f"\u0120{word}" in vocabulary][COMMON_WORDS:]


def encode_filler(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    pieces = [text[start : start + 20000] for text in documents for start in range(0, len(text), 20000)]
    np.random.default_rng(0).shuffle(pieces)
    encoded: list[np.ndarray] = []
    total = 0
    for first in range(0, len(pieces), 200):
        for encoding in tokenizer.encode_batch(pieces[first : first + 200]):
            encoded.append(np.array(encoding.ids, dtype=np.uint16))
            total += len(encoding.ids)
        if total > FILLER_TOKENS:
            break
    return np.concatenate(encoded)[:FILLER_TOKENS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("debs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("training/build"))
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json and keep the word list")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    documents = collect(options.debs)
    if options.tokenizer is not None:
        shutil.copyfile(options.tokenizer, options.out / "tokenizer.json")
        tokenizer = Tokenizer.from_file(str(options.tokenizer))
    else:
        tokenizer = train_tokenizer(documents)
        tokenizer.save(str(options.out / "tokenizer.json"))
        words = single_token_words(documents, tokenizer)
        WORDS.write_text("\n".join(words) + "\n")
        print(f"{tokenizer.get_vocab_size()} tokens, {len(words)} words")
    np.save(options.out / "filler.npy", encode_filler(documents, tokenizer))


if __name__ == "__main__":
    main()
