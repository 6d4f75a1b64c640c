"""Finds parts of a JSON schema that no finite value satisfies, like a list whose elements must have a next element.

The grammar of such a part is legal, but an answer that enters it never ends.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from hotset.base.structure import invalid_structure

Path = tuple[str, ...]  # of a part of the schema: names of members and indices
SCHEMAS_BY_NAME = ("properties", "patternProperties")
SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE_SCHEMAS = ("additionalProperties", "items")


def check_finite(schema: Any) -> None:
    """Raises RequestError with the path of a part that an answer can enter and never complete."""
    parts = _Parts(schema)
    finite: set[Path] = set()
    pending = list(parts.schemas)
    while pending:
        path = pending.pop()
        if path not in finite and parts.has_finite_value(path, finite):
            finite.add(path)
            pending += parts.users[path]
    endless = next((path for path in parts.schemas if path not in finite), None)
    if endless is not None:
        pointer = "".join(f"/{name}" for name in parts.cycle(endless, finite))
        raise invalid_structure(
            f"no finite value satisfies the JSON schema at #{pointer}: it requires a value of its own kind within "
            "itself; make a property on the way optional or nullable"
        )


class _Parts:
    """The parts of a schema that an answer can enter: the whole, and what it contains or refers to."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.schemas: dict[Path, Any] = {}
        self.users: defaultdict[Path, list[Path]] = defaultdict(list)  # the parts that depend on a part
        pending: list[Path] = [()]
        while pending:
            path = pending.pop()
            if path in self.schemas:
                continue
            self.schemas[path] = schema = _at(root, path)
            for inner in _inner_paths(path, schema):
                self.users[inner].append(path)
                pending.append(inner)

    def has_finite_value(self, path: Path, finite: set[Path]) -> bool:
        """Returns whether a part has a finite value if those in `finite` have one, as far as recursion decides it."""
        return not self._missing(path, finite)

    def cycle(self, path: Path, finite: set[Path]) -> Path:
        """Returns the part that leads back to one before it, beginning with `path`, which has no finite value."""
        seen = {path}
        while (needed := self._missing(path, finite)[0]) not in seen:
            seen.add(needed)
            path = needed
        return path

    def _missing(self, path: Path, finite: set[Path]) -> list[Path]:
        """Returns parts that a value of this part needs and that have no finite value. Empty: it has a finite value."""
        schema = self.schemas[path]
        if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
            return []
        needed = [*_references(schema), *((*path, "allOf", str(at)) for at in range(len(_list(schema, "allOf"))))]
        missing = [inner for inner in needed if inner not in finite]
        for name in ("anyOf", "oneOf"):
            alternatives = [(*path, name, str(at)) for at in range(len(_list(schema, name)))]
            if alternatives and not any(inner in finite for inner in alternatives):
                missing += alternatives
        types = schema.get("type")
        containers = {types} if isinstance(types, str) else set(types) if isinstance(types, list) else set()
        if containers and containers <= {"object", "array"}:
            lacking = [self._missing_of(kind, path, schema, finite) for kind in sorted(containers, reverse=True)]
            missing += [] if not all(lacking) else lacking[0]
        return missing

    def _missing_of(self, kind: str, path: Path, schema: Mapping[str, Any], finite: set[Path]) -> list[Path]:
        """Returns the required members of an object, or the required elements of a list, without finite values."""
        if kind == "object":
            properties = schema.get("properties", {})
            names = [name for name in _list(schema, "required") if isinstance(name, str)]
            needed = [
                (*path, "properties", name) if name in properties else (*path, "additionalProperties") for name in names
            ]
        else:
            count, given = schema.get("minItems", 0), len(_list(schema, "prefixItems"))
            count = count if isinstance(count, int) else 0
            needed = [(*path, "prefixItems", str(at)) for at in range(min(count, given))]
            needed += [(*path, "items")] if count > given else []
        return [inner for inner in needed if inner in self.schemas and inner not in finite]


def _inner_paths(path: Path, schema: Any) -> Iterable[Path]:
    if not isinstance(schema, Mapping):
        return
    yield from _references(schema)
    for name in SCHEMAS_BY_NAME:
        if isinstance(named := schema.get(name), Mapping):
            yield from ((*path, name, key) for key in named)
    for name in SCHEMA_LISTS:
        yield from ((*path, name, str(at)) for at in range(len(_list(schema, name))))
    for name in SINGLE_SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            yield (*path, name)


def _references(schema: Mapping[str, Any]) -> list[Path]:
    """Returns the path that a reference within the document leads to. The compiler checks that there is a schema."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return []
    names = reference.split("/")[1:]
    return [tuple(unquote(name).replace("~1", "/").replace("~0", "~") for name in names)]


def _at(root: Any, path: Path) -> Any:
    """Returns the part of a schema at a path, or None if there is none."""
    value = root
    for name in path:
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
