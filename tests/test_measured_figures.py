"""Tables of measured figures in documents agree with docs/results/, and results whose files changed are marked."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
import results

ROOT = results.ROOT


def test_documents_have_the_tables_of_docs_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert results.main(["--check"]) == 0, f"run scripts/results.py: {capsys.readouterr().out}"


def test_every_table_of_results_is_in_a_document() -> None:
    texts = "\n".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    sets = results.read_sets().values()
    named = {block[1] for block in results.BLOCK.findall(texts)}
    assert {f"{each.name}/{number}" for each in sets for number in range(len(each.tables))} <= named
    assert {group for each in sets for line in each.headlines for group in line["groups"]} == {
        name.removeprefix("headlines/") for name in named if name == "readme" or name.startswith("headlines/")
    }


@pytest.mark.parametrize("name", sorted(results.read_sets()))
def test_a_set_of_results_names_its_origin_and_files_that_exist(name: str) -> None:
    found = results.read_sets()[name]
    assert found.title and found.hardware and found.torch and found.date and found.commit and found.depends_on
    assert [path for path in found.depends_on if not (ROOT / path).exists()] == []


def test_figures_are_marked_when_a_file_behind_them_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "DATA", tmp_path)
    (tmp_path / "kernel.py").write_text("BLOCKS = 4\n")
    digest = results.digest_of(results.working_files("kernel.py"))
    content = {"title": "Speed", "hardware": "a GPU", "torch": "2", "date": "2026-11-19", "command": "", "commit": "c"}
    table = {"columns": ["what", "us"], "rows": [["copy", "4.5"]]}
    (tmp_path / "speed.json").write_text(json.dumps(content | {"depends_on": {"kernel.py": digest}, "tables": [table]}))
    document = tmp_path / "README.md"
    document.write_text("# Figures\n\n<!-- results: speed/0 -->\n<!-- end of results -->\n")
    assert results.main(["--check"]) == 1 and results.main([]) == results.main(["--check"]) == 0
    assert "| what | us |\n|---|---|\n| copy | 4.5 |\n" in document.read_text() and "†" not in document.read_text()
    (tmp_path / "kernel.py").write_text("BLOCKS = 5\n")
    assert results.main(["--check"]) == 1 and results.main([]) == 0
    assert "† Measured before the last change of `kernel.py`." in document.read_text()
