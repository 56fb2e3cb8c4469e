"""Public names keep to the glossary: one plain word for each thing."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = (
    "abr/estimators.py",
    "abr/policy.py",
    "abr/view.py",
    "client/options.py",
    "engines/settings.py",
    "player/play_choices.py",
    "player/session_types.py",
    "telemetry/listener.py",
    "types/peer.py",
)
"""Modules whose classes users read in addition to those that `kvabr` exports: actions, options, views, listeners."""
BANNED = set(
    re.findall(
        r"\w+",
        "ask asked asks behind beside believes came comes doubts gone hear heard hears hopes hurry kept knows nobody"
        " rich tell tells told unkept untold want wanted wants whose",
    )
)
SCHEMA = {"Catalog.asked"}
"""A field of catalogs that are published already."""
TERMS = {
    "asset": "kvabr.types.errors.AssetError",
    "catalog": "kvabr.types.catalog.Catalog",
    "deadline": "kvabr.abr.view.View.deadline_s",
    "group": "kvabr.types.kv.KVSpec.group_tokens",
    "live edge": "kvabr.types.live.LiveCatalog",
    "loss": "kvabr.client.result.Played.loss",
    "lower bound": "kvabr.abr.view.View.lower_bound",
    "policy": "kvabr.abr.policy.Policy",
    "store": "kvabr.types.errors.StoreError",
    "track": "kvabr.types.catalog.Track",
    "upgrade": "kvabr.client.upgrades.Upgrades",
}
"""Terms of the glossary that name a class or a field."""


@functools.cache
def classes(path: Path) -> dict[str, set[str]]:
    """Return the public names of a module's public classes: methods, their parameters, and attributes."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            names = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
            for each in node.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    if each.name[0] != "_" or each.name == "__init__":
                        names |= {each.name, *(one.arg for one in [*each.args.args, *each.args.kwonlyargs])}
                    stored = (one for one in ast.walk(each) if isinstance(one, ast.Attribute))
                    names |= {one.attr for one in stored if isinstance(one.ctx, ast.Store)}
            found[node.name] = {name for name in names if name[0] != "_"} | {node.name}
    return found


def public() -> set[str]:
    """Return all public names as ``Class.name``."""
    paths = {ROOT / "kvabr" / name for name in PUBLIC}
    for node in ast.walk(ast.parse((ROOT / "kvabr" / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvabr."):
            paths.add(ROOT / f"{node.module.replace('.', '/')}.py")
    return {f"{kind}.{name}" for path in paths for kind, names in classes(path).items() for name in names}


def words(name: str) -> set[str]:
    """Return the words of a name, in lower case."""
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def test_public_names_have_no_banned_words():
    names = public()
    assert len(names) > 500
    assert names >= SCHEMA
    assert {name for name in names - SCHEMA if words(name.partition(".")[2]) & BANNED} == set()


@pytest.mark.parametrize("term", TERMS)
def test_terms_are_names(term):
    listed = re.findall(r"^([^\n:].*)\n:   ", (ROOT / "docs" / "reference" / "glossary.md").read_text(), re.MULTILINE)
    assert term in {each.strip() for line in listed for each in line.split(",")}
    module, kind, name = re.fullmatch(r"([a-z._]+)\.([A-Z]\w+)(?:\.(\w+))?", TERMS[term]).groups()
    assert (name or kind) in classes(ROOT / f"{module.replace('.', '/')}.py")[kind]
