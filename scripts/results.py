#!/usr/bin/env python3
"""Writes the tables of measured figures in README.md and docs/ from the files in docs/results/.

    scripts/results.py             writes the tables
    scripts/results.py --check     exits with 1 if a table and its data differ
    scripts/results.py --depend COMMIT PATH...     prints `depends_on` of a result that was measured at COMMIT

Each file in docs/results/ holds one set of results: hardware, torch, date and command of the measurement, the measured
commit, and the files and folders that the figures depend on, each with a digest at that commit. The digest of a folder
covers its .py, .cu and .cuh files. Figures are texts, as they were published: nothing is rounded here.

Documents have a table between two comments, `results: NAME` and `end of results`. NAME is a table of a set, like
`swap-in/0`, a group of headlines, like `headlines/CPU`, or `readme`. A dagger marks results that depend on files that
have changed since. Git is needed only for --depend.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "results"
SOURCES = (".py", ".cu", ".cuh")
MARK = "†"
BLOCK = re.compile(r"(<!-- results: ([\w./ -]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


@dataclass(frozen=True)
class ResultSet:
    """One file in docs/results/."""

    name: str
    title: str
    hardware: str
    torch: str
    date: str
    command: str
    commit: str
    depends_on: dict[str, str]  # files and folders -> their digests at `commit`
    headlines: list[dict[str, Any]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)

    @property
    def changed(self) -> list[str]:
        """The files and folders that have changed since the figures were measured."""
        return [path for path, digest in self.depends_on.items() if digest_of(working_files(path)) != digest]


def read_sets() -> dict[str, ResultSet]:
    return {path.stem: ResultSet(path.stem, **json.loads(path.read_text())) for path in sorted(DATA.glob("*.json"))}


def working_files(path: str) -> Iterator[tuple[str, bytes]]:
    for file in [ROOT / path] if (ROOT / path).is_file() else (ROOT / path).rglob("*"):
        if file.suffix in SOURCES:
            yield file.relative_to(ROOT).as_posix(), file.read_bytes()


def committed_files(commit: str, path: str) -> Iterator[tuple[str, bytes]]:
    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout

    for name in git("ls-tree", "-r", "--name-only", commit, "--", path).decode().splitlines():
        if name.endswith(SOURCES):
            yield name, git("show", f"{commit}:{name}")


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    total = hashlib.sha256()
    for name, content in sorted(files):
        total.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()[:16]


def table_text(columns: list[str], rows: Iterable[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in line)}|\n" for line in lines).replace(
        "| --- ", "|---"
    )


def footnote(changed: Iterable[str]) -> str:
    names = [f"`{path}`" for path in changed]
    return f"\n{MARK} Measured before the last change of {', '.join(names)}.\n" if names else ""


def headline_rows(sets: dict[str, ResultSet], group: str) -> Iterator[tuple[dict[str, Any], ResultSet]]:
    found = [(line, source) for source in sets.values() for line in source.headlines if group in line["groups"]]
    return iter(sorted(found, key=lambda item: int(item[0]["groups"][group])))


def headlines(sets: dict[str, ResultSet], group: str) -> str:
    rows, changed = [], set[str]()
    for line, source in headline_rows(sets, group):
        changed.update(source.changed)
        date = f"{line.get('date', source.date)}{' ' + MARK if source.changed else ''}"
        if group == "readme":
            where = f"{source.hardware}, torch {source.torch}, {date}"
            rows.append([line["readme"]["what"], line["result"], where, f"`{line['readme']['command']}`"])
        else:
            rows.append([line["what"], line["result"], line["bar"], line["verdict"], date])
    columns = ["what", "result", "hardware, date", "command"]
    if group != "readme":
        columns = ["what", "result", "bar", "verdict", "date"]
    return table_text(columns, rows) + footnote(sorted(changed))


def generated(name: str, sets: dict[str, ResultSet]) -> str:
    """Returns the text between the comments of a table."""
    kind, _, rest = name.partition("/")
    if name == "readme" or kind == "headlines":
        return headlines(sets, rest or name)
    table = sets[kind].tables[int(rest)]
    return table_text(table["columns"], table["rows"]) + footnote(sets[kind].changed)


def rewritten(path: Path, sets: dict[str, ResultSet]) -> str:
    def replaced(block: re.Match[str]) -> str:
        return block[1] + generated(block[2], sets) + block[3]

    return BLOCK.sub(replaced, path.read_text())


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--depend"]:
        print(json.dumps({path: digest_of(committed_files(arguments[1], path)) for path in arguments[2:]}, indent=1))
        return 0
    sets = read_sets()
    different = []
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        text = rewritten(path, sets)
        if text != path.read_text():
            different.append(path.relative_to(ROOT).as_posix())
            if "--check" not in arguments:
                path.write_text(text)
    if different:
        print(f"{'tables differ from docs/results' if '--check' in arguments else 'written'}: {', '.join(different)}")
    return int(bool(different) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
