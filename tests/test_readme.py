"""Commands and code in the README are valid. Files of the repository that documents mention by their path exist,
and so do the identifiers in CONTRIBUTING.md, docs/architecture.md and docs/internals/."""

import ast
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer
from pydantic import ValidationError

import hotset
from hotset import LLM, SamplingParams
from hotset.base.config import EngineConfig
from hotset.cli import app
from hotset.serve.protocol import ChatRequest, CompletionRequest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
INTERNALS = [f"docs/internals/{path.name}" for path in ROOT.glob("docs/internals/*.md")]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
DOCUMENTS += [*INTERNALS, *(f"docs/history/{path.name}" for path in ROOT.glob("docs/history/*.md"))]
BODIES = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
KEYWORDS = {
    "LLM": {setting.name for setting in fields(EngineConfig)} | {"progress"},
    "SamplingParams": {setting.name for setting in fields(SamplingParams)},
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[list[str]]:
    """Returns the words of each command. A command continues after a line with an open quote or a final backslash."""
    found, pending = [], ""
    for line in block.replace("\\\n", " ").splitlines(keepends=True):
        pending += line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote is open
            continue
        if words:
            found.append(words)
            pending = ""
    assert not pending.strip(), f"incomplete command: {pending}"
    return found


def check_command(words: list[str]) -> None:
    """Fails unless the command and its arguments are valid. Nothing is run."""
    match words:
        case ["make", target, *variables]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
                f"the Makefile has no target {target}"
            )
            for variable in variables:
                name, _, value = variable.partition("=")
                assert name == "ARGS", f"this test accepts only the variable ARGS, got {name}"
                check_command(["hotset", target, *shlex.split(value)])
        case ["hotset", command, *arguments]:
            known = typer.main.get_command(app).commands
            assert command in known, f"hotset has no command {command}"
            try:
                known[command].make_context(command, arguments)
            except Exception as error:
                raise AssertionError(f"{shlex.join(words)}: {error}") from error
        case ["curl", url, *options]:
            BODIES[urlsplit(url).path].model_validate_json(options[options.index("-d") + 1])
        case _:
            raise AssertionError(f"{words[0]} is not a command that this test can check")


def check_python(source: str) -> None:
    """Fails unless the source compiles and uses names, keywords and methods that exist."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "hotset":
            assert all(hasattr(hotset, alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "llm":
            assert hasattr(LLM, node.attr), ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KEYWORDS:
            assert {keyword.arg for keyword in node.keywords} <= KEYWORDS[node.func.id], ast.unparse(node)


README_COMMANDS = [words for block in blocks(README, "sh") for words in commands(block)]
BENCH_COMMANDS = [
    words for block in blocks((ROOT / "docs" / "bench.md").read_text(), "sh") for words in commands(block)
]


@pytest.mark.parametrize("words", [*README_COMMANDS, *BENCH_COMMANDS], ids=lambda words: " ".join(words[:2]))
def test_every_command_in_the_readme_and_in_the_page_on_measuring_is_valid(words: list[str]) -> None:
    check_command(words)


def test_readme_shows_the_server_the_command_line_and_a_request() -> None:
    assert {words[0] for words in README_COMMANDS} == {"make", "hotset", "curl"}


def test_python_in_the_readme_uses_names_that_exist() -> None:
    sources = blocks(README, "python")
    assert sources
    for source in sources:
        check_python(source)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_documents_mention_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"[` ]((?:hotset|tests|benchmarks|docs|\.ci)/[\w./-]*)`", text)
    missing = [link for link in links if not (ROOT / name).parent.joinpath(link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


@pytest.fixture(scope="module")
def words() -> set[str]:
    """Returns all words of the code, and the names of the test files."""
    files = [*ROOT.glob("hotset/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "pyproject.toml"]
    return {path.stem for path in files}.union(*(re.findall(r"\w+", path.read_text()) for path in files))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md", *INTERNALS])
def test_identifiers_that_documents_mention_exist(name: str, words: set[str]) -> None:
    text = (ROOT / name).read_text()
    identifiers = re.findall(r"`([A-Za-z_][\w.]*?)(?:\([^`]*\))?`", text)
    files = re.findall(r"`((?:base|kernels|memory|models|schedule|engine|serve|cli)/[\w./]+)`", text)
    assert [name for name in identifiers if not set(name.split(".")) - {"py"} <= words] == []
    assert [file for file in files if not (ROOT / "hotset" / file).exists()] == []


@pytest.mark.parametrize(
    "block",
    [
        "make sevre\n",
        'make serve ARGS="--prot 9000"\n',
        "hotset serve --port eighty\n",
        "hotset talk\n",
        """curl http://x/v1/chat/completions -d '{"model": "embedded"}'\n""",
        "uv pip install hotset\n",
    ],
)
def test_checker_reports_a_command_that_would_fail(block: str) -> None:
    [words] = commands(block)
    with pytest.raises((AssertionError, ValidationError)):
        check_command(words)


def test_checker_joins_the_lines_of_one_command() -> None:
    body = {"model": "m"}
    block = f"curl x \\\n  -d '{json.dumps(body, indent=2)}'  # comment\n\nhotset info\n"
    assert commands(block) == [["curl", "x", "-d", json.dumps(body, indent=2)], ["hotset", "info"]]


@pytest.mark.parametrize(
    "source", ["from hotset import LLMs", "llm.genrate('x')", "LLM('x', max_seqs=1)", "SamplingParams(temp=0)", "x ="]
)
def test_checker_reports_python_that_would_fail(source: str) -> None:
    with pytest.raises((AssertionError, SyntaxError)):
        check_python(source)
