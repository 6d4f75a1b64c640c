"""Finds parts of a JSON schema that no finite value satisfies, like a list whose elements must have a next element.

The grammar of such a part is legal, but an answer that enters it never ends. The check takes linear time. Each part
is a node of a graph. A node has a finite value if all nodes that it needs have one. If these are alternatives, one
of them suffices.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from hotset.base.structure import invalid_structure

Path = tuple[str, ...]  # of a part of the schema: names of members and indices
SCHEMAS_BY_NAME = ("properties", "patternProperties")
SCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE_SCHEMAS = ("additionalProperties", "items")
INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def check_finite(schema: Any) -> None:
    """Raises RequestError with the path of a part that an answer can enter and never complete."""
    graph = _Graph(schema)
    graph.find_finite()
    endless = next((node for node in graph.parts.values() if not node.finite), None)
    if endless is not None:
        pointer = "".join(f"/{name}" for name in _cycle(endless))
        raise invalid_structure(
            f"no finite value satisfies the JSON schema at #{pointer}: it requires a value of its own kind within "
            "itself; make a property on the way optional or nullable"
        )


@dataclass(eq=False, slots=True)
class _Node:
    """A part of the schema, or a group of nodes: a part needs all of the group, or any one of it."""

    path: Path | None = None  # None: not a part
    needs: "list[_Node]" = field(default_factory=list)
    users: "list[_Node]" = field(default_factory=list)  # nodes that need this one, once per need
    missing: int = 0  # how many of `needs` must still turn out to be finite

    @property
    def finite(self) -> bool:
        return self.missing <= 0

    def need(self, nodes: "Iterable[_Node]", *, one: bool = False) -> "_Node":
        """Makes this node need all of `nodes` or, if `one`, any one of them. Returns this node."""
        for node in nodes:
            self.needs.append(node)
            node.users.append(self)
        self.missing = 1 if one else len(self.needs)
        return self


class _Graph:
    """The parts of a schema that an answer can enter: the schema itself, and all that it contains or refers to."""

    def __init__(self, root: Any) -> None:
        self.parts: dict[Path, _Node] = {}
        self._nodes: list[_Node] = []
        schemas: list[tuple[_Node, Any]] = []
        pending: list[Path] = [()]
        while pending:
            path = pending.pop()
            if path in self.parts:
                continue
            schema = _at(root, path)
            self.parts[path] = self._new(path)
            schemas.append((self.parts[path], schema))
            pending += _inner_paths(path, schema)
        for node, schema in schemas:
            if isinstance(schema, Mapping) and "enum" not in schema and "const" not in schema:
                node.need(self._needs(node, schema))

    def find_finite(self) -> None:
        """Finds all finite nodes, beginning with those that need no other: counts down `missing` of their users."""
        finite = deque(node for node in self._nodes if node.finite)
        while finite:
            for user in finite.popleft().users:
                user.missing -= 1
                if user.missing == 0:
                    finite.append(user)

    def _new(self, path: Path | None = None) -> _Node:
        self._nodes.append(_Node(path))
        return self._nodes[-1]

    def _needs(self, node: _Node, schema: Mapping[str, Any]) -> Iterator[_Node]:
        """Yields the nodes that must be finite for the schema of a part to have a finite value."""
        assert node.path is not None, "it is a part"
        path = node.path
        yield from (self.parts[inner] for inner in _references(schema))
        yield from (self.parts[inner] for inner in _elements(path, schema, "allOf"))
        for name in ("anyOf", "oneOf"):
            if alternatives := [self.parts[inner] for inner in _elements(path, schema, name)]:
                yield self._new().need(alternatives, one=True)
        types = schema.get("type")
        kinds = {types} if isinstance(types, str) else {kind for kind in _list(schema, "type") if isinstance(kind, str)}
        if kinds and kinds <= {"object", "array"}:
            alternatives = [self._new().need(self._contents(kind, path, schema)) for kind in sorted(kinds)[::-1]]
            yield self._new().need(alternatives, one=True)

    def _contents(self, kind: str, path: Path, schema: Mapping[str, Any]) -> list[_Node]:
        """Returns the nodes of the required members of an object, or of the required elements of a list."""
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
        return [self.parts[inner] for inner in needed if inner in self.parts]


def _cycle(node: _Node) -> Path:
    """Returns a part that requires a value of its own kind. `node` has no finite value, so its needs lead to one."""
    seen: set[_Node] = set()
    newest: Path = ()
    while node not in seen:
        seen.add(node)
        newest = newest if node.path is None else node.path
        node = next(needed for needed in node.needs if not needed.finite)
    return newest


def _inner_paths(path: Path, schema: Any) -> Iterator[Path]:
    if not isinstance(schema, Mapping):
        return
    yield from _references(schema)
    for name in SCHEMAS_BY_NAME:
        if isinstance(named := schema.get(name), Mapping):
            yield from ((*path, name, key) for key in named)
    for name in SCHEMA_LISTS:
        yield from _elements(path, schema, name)
    for name in SINGLE_SCHEMAS:
        if isinstance(schema.get(name), Mapping):
            yield (*path, name)


def _elements(path: Path, schema: Mapping[str, Any], name: str) -> Iterator[Path]:
    return ((*path, name, str(at)) for at in range(len(_list(schema, name))))


def _references(schema: Mapping[str, Any]) -> list[Path]:
    """Returns the target of a reference within the document. The compiler checks that a schema is there."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return []
    names = reference.split("/")[1:]
    return [tuple(unquote(name).replace("~1", "/").replace("~0", "~") for name in names)]


def _at(root: Any, path: Path) -> Any:
    """Returns the part of a schema at a path, or None if there is none. Raises RequestError for an index like "01",
    because each part must have only one path."""
    value = root
    for name in path:
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and INDEX.fullmatch(name):
            value = value[int(name)] if int(name) < len(value) else None
        elif isinstance(value, list) and name.isdigit():
            raise invalid_structure(
                f"a $ref in the JSON schema has the index {name[:16]!r}; write indices in the digits 0 to 9, without "
                "leading zeros"
            )
        else:
            return None
    return value


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []
