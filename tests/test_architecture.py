"""The shape of kvabr and of its laboratory: floors, circles, and names.

Data flows one way, and a package imports only packages on lower floors. The list below is the order of the floors. The
laboratory is a distribution of its own above all of kvabr, which does not know it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import kvabr
import kvabr_lab

ROOTS = tuple(Path(package.__file__).parent for package in (kvabr, kvabr_lab))
LAB = ("lab.policies", "lab.route", "lab.day", "lab.live", "lab", "lab.report", "lab.bench", "lab.cli")
FLOORS = (
    *("types", "codec", "abr", "blend", "player", "moqt", "qmux", "store", "telemetry", "transfer", "link"),
    *("client", "publish", "server", "engines", "replay", "cli", *LAB),
)
"""From the ground up."""
BASEMENT = ("data",)
"""May import `types` alone; everybody may import it."""


def _name_of(path: Path) -> str:
    root = next(root for root in ROOTS if path.is_relative_to(root))
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of kvabr and of the laboratory by its dotted name."""
    return {_name_of(path): path for root in ROOTS for path in sorted(root.rglob("*.py"))}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


@cache
def _imports(name: str) -> tuple[tuple[str, bool], ...]:
    """Return the modules that a module imports, also inside functions, and whether for type checking only."""
    found: list[tuple[str, bool]] = []
    left: list[tuple[ast.AST, bool]] = [(tree(name), False)]
    for node, typing in left:
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: relative import"
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.expr):
            continue
        else:
            never = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            left += ((child, typing or never) for child in ast.iter_child_nodes(node))
            continue
        for dotted in wanted:
            target = dotted if dotted in modules() else dotted.rpartition(".")[0]
            if target in modules() and target != name:
                found.append((target, typing))
    return tuple(found)


def imports(name: str, *, typing: bool) -> Iterator[str]:
    """Yield the modules that a module imports, with or without those for type checking."""
    return (target for target, only_typing in _imports(name) if typing or not only_typing)


def room(name: str) -> str:
    package, first = (*name.split("."), "")[:2]
    if package == "kvabr":
        return first
    return f"lab.{first}" if f"lab.{first}" in LAB else "lab"


def test_every_package_has_a_floor():
    assert {room(name) for name in modules()} == {*FLOORS, *BASEMENT, "", "__main__"}


@pytest.mark.parametrize("floor", [*FLOORS, *BASEMENT])
def test_a_package_imports_only_lower_floors(floor: str):
    allowed = {"types", floor} if floor in BASEMENT else {*FLOORS[: FLOORS.index(floor) + 1], *BASEMENT}
    upward = [
        f"{name} -> {target}"
        for name in modules()
        if room(name) == floor
        for target in imports(name, typing=True)
        if room(target) not in allowed and target != "kvabr"
    ]
    assert not upward


def test_only_transports_and_servers_speak_moqt():
    speakers = {
        room(name) for name in modules() if any(room(target) == "moqt" for target in imports(name, typing=True))
    }
    assert speakers <= {"moqt", "link", "server"}


def test_client_and_server_do_not_know_each_other():
    pair = {"client", "server"}
    assert not [
        f"{name} -> {target}"
        for name in modules()
        for target in imports(name, typing=True)
        if {room(name), room(target)} == pair
    ]


def test_no_files_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = defaultdict(set)
    for name in modules():
        for target in imports(name, typing=True):
            # A package's __init__ that re-exports its own modules is not an import of theirs.
            if not name.startswith(f"{target}."):
                graph[name].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_class_names_are_unique():
    places: dict[str, list[str]] = defaultdict(list)
    for name in modules():
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_files_hold_one_idea():
    """How long an idea is, nobody can measure; a file of a thousand lines holds several."""
    long = {name: lines for name, path in modules().items() if (lines := path.read_text().count("\n")) > 1000}
    assert not long


def test_public_methods_are_documented_here_or_by_what_they_override():
    methods = [
        (f"{name}.{node.name}.{method.name}", method)
        for name in modules()
        for node in tree(name).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and not method.name.startswith("_")
    ]
    documented = {method.name for _, method in methods if ast.get_docstring(method) is not None}
    assert [where for where, method in methods if method.name not in documented] == []


_UNTYPED = {"Meta", "Raw", "Struct", "MsgspecError", "ValidationError", "msgpack.Encoder", "structs.asdict"}
"""Names of msgspec that work out no type, or only that of a class that is being defined."""


def test_only_records_hand_msgspec_a_type():
    """Msgspec works out types without a lock; `kvabr.types.records` holds one, see there."""
    used = {
        (name, dotted)
        for name in modules()
        if name != "kvabr.types.records"
        for node in ast.walk(tree(name))
        for dotted in _names_of_msgspec(node)
    }
    assert {(name, dotted) for name, dotted in used if dotted not in _UNTYPED} == set()
    assert ("kvabr.telemetry.kv_events.wire", "msgpack.Encoder") in used


def _names_of_msgspec(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "msgspec":
        inner = "".join(f"{each}." for each in (node.module or "").split(".")[1:])
        yield from (inner + alias.name for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (f"import {alias.name}" for alias in node.names if alias.name.startswith("msgspec."))
    elif isinstance(node, ast.Attribute):
        dotted = ast.unparse(node)
        inner = dotted.removeprefix("msgspec.")
        if inner != dotted and inner not in {"msgpack", "json", "structs"}:
            yield inner
