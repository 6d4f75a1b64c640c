"""The model that a user names: suggestions for a misspelt one, and models of the Hugging Face cache."""

import importlib.util
import os
import runpy
from pathlib import Path

import huggingface_hub
import pytest
from harness import tiny_directory

from hotset.base.config import EngineConfig, hub_cache
from hotset.base.errors import CheckpointError
from hotset.engine.model_checks import check_model
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.model_names import downloaded_models, local_models, model_name

NAME = "some-lab/Tiny-Model-1.0"
OLD, NEW = "0" * 40, "1" * 40


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, which has no models. The Hugging Face cache is in its folder `hub`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return Path(tiny_directory(folder))


def download(cache: Path, *revisions: str, main: str | None) -> Path:
    """Writes a model into a Hugging Face cache, and returns its folder."""
    folder = cache / "models--some-lab--Tiny-Model-1.0"
    for age, revision in enumerate(reversed(revisions)):
        snapshot = make_model(folder / "snapshots" / revision)
        os.utime(snapshot, (1000.0 - age, 1000.0 - age))
    if main is not None:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)
    return folder


def refusal(model: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        find_model(model)
    return str(refused.value)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("Embeded", "did you mean embedded?"),
        ("models/glm-5-tiny", "did you mean models/GLM-5.1-tiny?"),
        ("GLM-5.1-tiny", "did you mean models/GLM-5.1-tiny?"),
        ("smol.gguf", "did you mean smol-q8.gguf?"),
        ("xyzzy", "models that exist here: 'embedded', smol-q8.gguf, models/GLM-5.1-tiny"),
    ],
)
def test_for_a_missing_model_existing_ones_are_suggested(typed: str, answer: str, empty_folder: Path) -> None:
    make_model(empty_folder / "models" / "GLM-5.1-tiny")
    (empty_folder / "smol-q8.gguf").touch()
    (empty_folder / "notes").mkdir()
    message = refusal(typed)
    assert message.startswith(f"{typed} does not exist; a model is a directory with config.json, a .gguf file, or")
    assert message.endswith(answer)
    assert local_models() == [Path("smol-q8.gguf"), Path("models/GLM-5.1-tiny")]


def test_a_folder_of_models_is_answered_with_its_models(empty_folder: Path) -> None:
    make_model(empty_folder / "models" / "GLM-5.1-tiny")
    assert refusal("models") == "models holds no config.json; it contains models/GLM-5.1-tiny"


def test_a_hub_name_that_was_not_downloaded_is_explained(empty_folder: Path) -> None:
    message = refusal("deepseek-ai/DeepSeek-V3.2")
    assert "looks like a name on a model hub" in message and str(empty_folder / "hub") in message
    assert "hf download deepseek-ai/DeepSeek-V3.2 --local-dir DeepSeek-V3.2 " in message
    (empty_folder / "deepseek-ai").mkdir()
    assert "does not exist" in refusal("deepseek-ai/DeepSeek-V3.2"), "this is a path, because its folder exists"


@pytest.mark.parametrize(("main", "used"), [(OLD, OLD), (NEW, NEW), (None, NEW), ("2" * 40, NEW)])
def test_a_downloaded_model_is_found_by_its_hub_name(main: str | None, used: str, empty_folder: Path) -> None:
    folder = download(empty_folder / "hub", OLD, NEW, main=main)
    assert find_model(NAME).path == folder / "snapshots" / used
    if main == used:
        found = huggingface_hub.snapshot_download(NAME, cache_dir=empty_folder / "hub", local_files_only=True)
        assert Path(found) == folder / "snapshots" / used
    assert check_model(EngineConfig(NAME, load_format="dummy", tokenizer=None)).spec.vocab == 50
    assert model_name(NAME) == model_name(str(folder / "snapshots" / used)) == "Tiny-Model-1.0"
    assert downloaded_models() == [NAME]


def test_a_directory_of_the_same_name_has_priority_over_the_cache(empty_folder: Path) -> None:
    download(empty_folder / "hub", NEW, main=NEW)
    make_model(empty_folder / "some-lab" / "Tiny-Model-1.0")
    assert find_model(NAME).path == Path(NAME)


def test_the_weights_that_a_download_lacks_are_named(empty_folder: Path) -> None:
    folder = download(empty_folder / "hub", NEW, main=NEW)
    with pytest.raises(CheckpointError, match=f"{folder / 'snapshots' / NEW} holds no .*safetensors files"):
        check_model(EngineConfig(NAME))


@pytest.mark.parametrize("name", ["../hub/x", "a/b/c", "a//b", "-a/b", "a/..", ""])
def test_only_hub_names_are_looked_up_in_the_cache(name: str, empty_folder: Path) -> None:
    assert "hub" not in refusal(name).replace(name, "")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/x"},
        {"HF_HOME": "~/h", "XDG_CACHE_HOME": "/x"},
        {"HF_HUB_CACHE": "$HOME/c", "HF_HOME": "/h"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/h"},
    ],
)
def test_the_cache_is_where_hugging_face_keeps_it(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    path = importlib.util.find_spec("huggingface_hub.constants").origin  # type: ignore[union-attr]
    constants = runpy.run_path(path, {"__package__": "huggingface_hub"})  # a fresh copy, which reads the environment
    assert str(hub_cache()) == constants["HF_HUB_CACHE"]
