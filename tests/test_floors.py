"""Checks the floors of docs/architecture.md: imports between folders, import cycles, and optional packages."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# A file imports only from its own folder and from lower floors. Folders on the same floor do not import each other.
CORE = {
    "base": 1,
    "grammar": 2,
    "kernels": 2,
    "memory": 3,
    "tiers": 4,
    "models": 4,
    "schedule": 5,
    "engine": 6,
    "serve": 7,
    "__init__": 7,
}
# What connects engines, and the tools around the engine. Both import the core, but not each other.
FLEET = {
    "fleet": 8,
    "fleet/child_process": 8,
    "fleet/kv_events": 8,
    "fleet/ray": 8,
    "fleet/transfer": 8,
    "fleet/handoff": 9,
    "fleet/router": 9,
    "fleet/cluster": 10,
    "fleet/connections": 10,
    "fleet/local": 10,
}
LAB = {"lab": 8, "lab/bench": 8, "lab/doctor": 8, "lab/evaluate": 8, "lab/plan": 9, "lab/simulate": 10}
FLOORS = CORE | FLEET | LAB | {"cli": 11, "__main__": 12}
GROUPS = ("fleet", "lab")  # folders of folders
NO_TORCH = (
    "base",
    "lab/bench",
    "fleet/child_process",
    "fleet/cluster",
    "fleet/kv_events",
    "fleet/local",
    "fleet/router",
    "grammar",
    "schedule",
    "serve",
)
# The offline API imports these, and so does an engine with peers. They must need no package of the server.
LIBRARY = [folder for folder, floor in CORE.items() if floor <= CORE["engine"]]
LIBRARY += ["fleet/connections", "fleet/handoff", "fleet/kv_events", "fleet/ray", "fleet/transfer"]
OPTIONAL = [
    *("pydantic", "fastapi", "uvicorn", "msgspec", "zmq", "nixl", "mooncake", "triton"),
    *("ray", "gguf", "jinja2", "transformers", "cuda", "llguidance"),
]
# Modules that require an optional package. Other modules import them inside the functions that use them.
REQUIRES_OPTIONAL = re.compile(
    r"hotset\.models\.chat_template|hotset\.kernels\.\w+\.(triton|cuda)_\w+|hotset\.fleet\.handoff\.(codec|channel)"
    r"|hotset\.fleet\.kv_events\.(wire|event_log|publisher|subscriber)|hotset\.fleet\.ray\.\w+"
)

IMPORT_EACH = """
import importlib, importlib.abc, sys
blocked, modules = sys.argv[1].split(","), sys.argv[2].split(",")
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Absent())
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        sys.exit(f"{module}: {error}")
"""


@dataclass(frozen=True)
class Import:
    """One imported module. `target` is a module even if the statement imports a name from that module."""

    importer: str
    target: str
    where: str  # path:line of the statement


class Tree:
    """The modules of package `hotset` below `root`, and all their imports, including those inside functions."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {self._module_name(path): path for path in sorted((root / "hotset").rglob("*.py"))}

    def _module_name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> list[Import]:
        return [
            Import(module, target, f"{path.relative_to(self.root)}:{node.lineno}")
            for module, path in self.files.items()
            for node in ast.walk(ast.parse(path.read_text(), str(path)))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for target in self._targets(node, module, is_package=path.name == "__init__.py")
        ]

    def _targets(self, node: ast.Import | ast.ImportFrom, module: str, *, is_package: bool) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            kept = parts[: len(parts) - node.level + is_package]
            base = ".".join([*kept, *([base] if base else [])])
        for alias in node.names:
            if f"{base}.{alias.name}" in self.files:
                yield f"{base}.{alias.name}"
            elif (base, alias.name) != ("hotset", "__version__"):  # every floor may import this constant
                yield base


def folder_of(module: str) -> str:
    """Returns the folder of a module below `hotset`: one part of its name, or two in `fleet` and `lab`."""
    parts = [*module.split("."), "__init__"][1:]
    return "/".join(parts[: 2 if parts[0] in GROUPS and len(parts) > 2 else 1])


def may_import(importer: str, target: str) -> bool:
    neighbours = {importer.partition("/")[0], target.partition("/")[0]} == set(GROUPS)
    return not neighbours and FLOORS.get(importer, 0) > FLOORS.get(target, 0)


def broken_floors(tree: Tree) -> list[str]:
    without_floor = sorted({folder_of(module) for module in tree.files} - FLOORS.keys())
    broken = [f"hotset/{folder} is on no floor" for folder in without_floor]
    for found in tree.imports:
        importer, target = folder_of(found.importer), folder_of(found.target)
        if found.target.partition(".")[0] == "hotset":
            if importer != target and not may_import(importer, target):
                broken.append(f"{found.where}: {importer} must not import {found.target}")
        elif found.target.partition(".")[0] == "torch" and importer in NO_TORCH:
            broken.append(f"{found.where}: {importer} must not import torch")
    return broken


def find_cycle(tree: Tree) -> list[str]:
    edges: dict[str, set[str]] = {module: set() for module in tree.files}
    for found in tree.imports:
        if found.target in edges:
            edges[found.importer].add(found.target)
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def failed_import(root: Path, modules: list[str], blocked: list[str]) -> str:
    """Returns the error of the first module that cannot be imported without the packages `blocked`, or ""."""
    command = [sys.executable, "-c", IMPORT_EACH, ",".join(blocked), ",".join(modules)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stderr or f"exit {done.returncode}"


def modules_of(tree: Tree, *folders: str) -> list[str]:
    return [module for module in tree.files if folder_of(module) in folders]


@pytest.fixture(scope="module")
def hotset_tree() -> Tree:
    tree = Tree(ROOT)
    assert "hotset.base.config" in tree.files
    return tree


def test_no_file_imports_another_folder_on_its_own_or_a_higher_floor(hotset_tree: Tree) -> None:
    assert broken_floors(hotset_tree) == []


def test_there_are_no_import_cycles(hotset_tree: Tree) -> None:
    assert find_cycle(hotset_tree) == []


def test_the_core_does_not_name_a_module_that_it_must_not_import() -> None:
    """`engine/connections.py` is the one place where the core loads such a module, by its name."""
    naming = [
        str(path.relative_to(ROOT))
        for folder in CORE
        for path in (ROOT / "hotset" / folder).rglob("*.py")
        if re.search(r"hotset\.(fleet|lab)", path.read_text())
    ]
    assert naming == ["hotset/engine/connections.py"]


def test_the_library_imports_without_optional_packages(hotset_tree: Tree) -> None:
    library = modules_of(hotset_tree, *LIBRARY)
    assert any(map(REQUIRES_OPTIONAL.fullmatch, library))
    modules = [module for module in library if not REQUIRES_OPTIONAL.fullmatch(module)]
    assert failed_import(ROOT, modules, OPTIONAL) == ""


def test_scheduler_server_router_and_command_line_import_without_torch(hotset_tree: Tree) -> None:
    """Without torch, server and router start a few seconds earlier and need a quarter of the memory."""
    modules = ["hotset.serve.server", "hotset.fleet.router.server", "hotset.engine.client"]
    modules += modules_of(hotset_tree, "base", "schedule", "cli", "lab/bench")
    assert failed_import(ROOT, modules, ["torch"]) == ""


def test_the_checks_of_a_model_import_without_torch_and_numpy() -> None:
    """The command line makes them before it starts a process. Each of these packages would delay its answer."""
    assert failed_import(ROOT, ["hotset.engine.model_checks"], ["torch", "numpy", "tokenizers", "safetensors"]) == ""


def make_tree(root: Path, **files: str) -> Tree:
    """Writes a package `hotset`. A keyword `folder__file` is the source of hotset/folder/file.py."""
    for name, source in files.items():
        path = root / "hotset" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    for folder in [root / "hotset", *(path for path in (root / "hotset").iterdir() if path.is_dir())]:
        (folder / "__init__.py").touch()
    return Tree(root)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"models__a": "from hotset.schedule.b import x", "schedule__b": ""}, "models must not import hotset.schedule"),
        ({"models__a": "from hotset import serve", "serve__b": ""}, "models must not import hotset.serve"),
        ({"memory__a": "import hotset.tiers.b", "tiers__b": ""}, "memory must not import hotset.tiers.b"),
        ({"base__a": "def f():\n    from ..engine import b", "engine__b": ""}, "base must not import hotset.engine.b"),
        ({"tiers__a": "from hotset import LLM"}, "tiers must not import hotset"),
        ({"engine__a": "def f():\n    import hotset.fleet.ray.b", "fleet__ray__b": ""}, "engine must not import"),
        ({"lab__simulate__a": "import hotset.fleet.ray.b", "fleet__ray__b": ""}, "lab/simulate must not import"),
        ({"schedule__a": "if True:\n    import torch.nn as nn"}, "schedule must not import torch"),
        ({"helpers__a": ""}, "hotset/helpers is on no floor"),
    ],
)
def test_checker_reports_an_import_that_breaks_the_floors(tmp_path: Path, files: dict[str, str], message: str) -> None:
    broken = broken_floors(make_tree(tmp_path, **files))
    assert len(broken) == 1 and message in broken[0]


def test_checker_reports_a_cycle_through_an_import_under_type_checking(tmp_path: Path) -> None:
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x"
    tree = make_tree(tmp_path, models__a="from . import b", models__b="import hotset.models.c", models__c=for_types)
    assert set(find_cycle(tree)) == {"hotset.models.a", "hotset.models.b", "hotset.models.c"}


def test_checker_accepts_imports_from_lower_floors_and_from_the_own_folder(tmp_path: Path) -> None:
    engine = "import torch\nfrom hotset import __version__\nfrom hotset.base.b import x\nfrom . import c"
    tree = make_tree(tmp_path, engine__a=engine, base__b="x = 1", engine__c="", models__d="import torch")
    assert (broken_floors(tree), find_cycle(tree)) == ([], [])


def test_checker_reports_an_import_of_a_package_that_should_be_optional(tmp_path: Path) -> None:
    make_tree(tmp_path, models__a="import json.decoder", models__b="def f():\n    import json")
    assert "hotset.models.a: json is blocked" in failed_import(tmp_path, ["hotset.models.a"], ["json"])
    assert failed_import(tmp_path, ["hotset.models.b"], ["json"]) == ""
