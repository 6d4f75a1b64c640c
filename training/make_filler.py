"""Makes `hotset/lab/evaluate/filler.txt.gz`: the running text in which evaluation hides its records.

    apt-get download python3.11-doc && dpkg -x python3.11-doc_*.deb FOLDER && python training/make_filler.py FOLDER

The text consists of paragraphs of the Python documentation without markup, one per line. Their licence (PSF License
Version 2) is stored next to the text.
"""

import gzip
import html
import re
import sys
from pathlib import Path

TEXT_BYTES = 1_500_000  # about 480 KB when compressed
MAX_WORD_LENGTH = 20  # paragraphs with longer words are dropped: one word of many tokens could make a prompt too long
SECTIONS = ("tutorial", "howto", "faq", "reference", "using", "library")
NOTICE = (
    "Paragraphs of the Python 3.11 documentation, shortened and without markup. Copyright 2001-2023 Python Software "
    "Foundation. PSF License Version 2: see filler-license.txt."
)


def paragraphs(page: str) -> list[str]:
    """Returns the running text of one page: ASCII, one line per paragraph, whole sentences only."""
    page = re.sub(r"(?s)<(script|style|head|pre)\b.*?</\1>", " ", page)
    texts = []
    for raw in re.findall(r"(?s)<p>(.*?)</p>", page):
        text = html.unescape(re.sub(r"<[^>]+>", "", raw)).replace("’", "'").replace("“", '"').replace("”", '"')
        text = " ".join(re.sub(r"[^\x20-\x7e]", " ", text).split())
        if len(text) > 80 and text.endswith((".", "?", "!")) and max(map(len, text.split())) <= MAX_WORD_LENGTH:
            texts.append(text)
    return texts


def licence(folder: Path) -> str:
    """Returns the PSF licence from the package's copyright file."""
    text = next(folder.rglob("python3.11-doc/copyright")).read_text()
    begin = text.index("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2")
    return text[begin : text.index("BEOPEN.COM LICENSE AGREEMENT", begin)].strip() + "\n"


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(__file__).parents[1] / "hotset" / "lab" / "evaluate"
    root = next(folder.rglob("html/tutorial")).parent
    pages = [page for section in SECTIONS for page in sorted((root / section).glob("*.html"))]
    lines: dict[str, None] = {}  # an ordered set
    for page in pages:
        lines.update(dict.fromkeys(paragraphs(page.read_text(encoding="utf-8"))))
    text = "\n".join(lines)[:TEXT_BYTES].rpartition("\n")[0]
    packed = gzip.compress(f"{NOTICE}\n{text}\n".encode(), 9, mtime=0)
    (target / "filler.txt.gz").write_bytes(packed)
    (target / "filler-license.txt").write_text(licence(folder))
    print(f"{len(text)} characters, {len(packed)} bytes compressed")


if __name__ == "__main__":
    main()
