"""The documents keep up with the code: commands parse, links lead somewhere, module paths exist."""

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvabr.abr.plugins import policies
from kvabr.cli.commands import names
from kvabr.cli.main import parse
from kvabr.data import default_catalog
from kvabr.replay.readers.names import table
from kvabr.types import installing


def first_line(path: Path) -> str:
    """Return the first line of a script; empty for what is not text."""
    return path.read_bytes().partition(b"\n")[0].decode(errors="replace")


ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / "README.md", ROOT / "traces" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TOOLS = [path for path in sorted((ROOT / "tools").rglob("*")) if path.is_file() and "python" in first_line(path)]
NAMES = {
    "kvabr.commands",
    "kvabr.policies",
    "kvabr.estimators",
    "kvabr.codecs",
    "kvabr.engines",
    "kvabr.selectors",
    "kvabr.catalog",
    "kvabr.edge",
    "kvabr.live",
    "kvabr.models",
    "kvabr.toml",
}
"""Entry points, tracks and a file, which look like modules."""


def commands(text: str) -> list[str]:
    """Return the `kvabr` command lines in a text's indented and fenced blocks, without comments; lines are joined."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    fenced = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines()
    lines += [f"    {line}" for line in fenced]
    found = (re.fullmatch(r"    (?:\.venv/bin/|\$ )?kvabr ([^\[]*?)(?:  +.*)?", line) for line in lines)
    return [match[1] for match in found if match is not None]


def helps() -> dict[str, str]:
    """Return the source of every command, whose help holds examples."""
    folders = (ROOT / "kvabr" / "cli", ROOT / "tools" / "lab" / "kvabr_lab" / "cli")
    return {str(path): path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_parse(path):
    for line in commands(path.read_text()):
        parse(shlex.split(line))


def test_examples_in_help_parse():
    """Examples are indented by two spaces in the epilogs."""
    count = 0
    for text in helps().values():
        for line in re.findall(r"^(?:  |      )kvabr ([a-z]+ [^\[\n]*?)(?:  +.*| && .*)?$", text, re.MULTILINE):
            parse(shlex.split(line))
            count += 1
    assert count > 25


def test_the_readme_names_real_commands():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`kvabr ([a-z]+)", text)) | {line.split()[0] for line in commands(text)}
    assert named
    assert named <= set(names())


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_definitions_are_rendered_as_such(path):
    """Python-Markdown leaves what it does not know as text: a colon at the beginning of a line."""
    markdown = pytest.importorskip("markdown", reason="mkdocs is not installed: tools/setup-venv")
    with (ROOT / "mkdocs.yml").open() as file:
        plain = [line.strip("- \n") for line in file if re.fullmatch(r"  - [a-z_]+\n", line)]
    html = markdown.markdown(path.read_text(), extensions=[name for name in plain if name in ("def_list", "attr_list")])
    assert not re.search(r"(?:^|<p>|\n): ", html)
    assert html.count("<dt>") <= html.count("<dd>")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_files_that_are_named_exist(path):
    text = path.read_text()
    for name in re.findall(r"(?<![\w/.-])(kvabr(?:_lab)?(?:\.\w+)+)(?![\w/])", text):
        assert name in NAMES or exists(name), f"{path.name}: {name}"
    for name in re.findall(r"(?<![\w/.-])(?:kvabr|tools|tests|docs|traces)/[\w/.-]*\w", text):
        assert (ROOT / name).exists(), f"{path.name}: {name}"


@pytest.mark.slow
@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.name)
def test_what_a_tool_imports_exists(path):
    """Tools are scripts that no type checker sees."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            assert not name.startswith(("kvabr.", "kvabr_lab.")) or exists(name), f"{path.name}: {name}"


@pytest.mark.process
@pytest.mark.slow
def test_tools_outside_the_environment_say_how_to_make_it():
    """All that import more than the standard library; try-wheel is run where a wheel is installed."""
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    count = 0
    for path in TOOLS:
        if "import _environment" not in path.read_text():
            imported = re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
            assert (
                path.name == "try-wheel"
                or path.suffix == ".py"
                or set(imported) <= {"__future__", *sys.stdlib_module_names}
            ), path
            continue
        command = [sys.executable, "-S", str(path), "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)  # noqa: S603
        assert done.returncode == 1, path.name
        assert "tools/setup-venv" in done.stderr, path.name
        assert "Traceback" not in done.stderr, path.name
        count += 1
    assert count > 8


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes_of_what_ships(path):
    """Sizes of the shipped profiles are those of the files; speeds are said again as the README has them."""
    text = " ".join(path.read_text().split())
    shipped = {f"{file.stat().st_size / 1e6:.1f}" for file in (ROOT / "kvabr" / "data").glob("*.profile.safetensors")}
    said = re.findall(r"profile (?:of the model |of Gemma 3 270M )?\(([\d.]+) MB", text)
    assert set(said) <= shipped
    (speed,) = set(re.findall(r"at ([\d]+ to [\d]+) million elements", (ROOT / "README.md").read_text()))
    tracks = default_catalog().tracks
    ratios = [
        sum(track.loss) / track.measured.kl for track in tracks if track.name.startswith("AC-L") and track.measured
    ]
    for low, high in re.findall(r"([\d.]+) to ([\d.]+) times the KL in the layers of the catalog that ships", text):
        assert (low, high) == (f"{min(ratios):.1f}", f"{max(ratios):.1f}")
    for other in re.findall(r"decodes ([\d]+ to [\d]+) million elements per second", text):
        assert other == speed


def test_the_guide_has_the_names_that_the_reader_knows():
    text = (ROOT / "docs" / "guides" / "replay.md").read_text()
    _, _, rest = text.partition("<!-- names of columns and units: kvabr.replay.readers.names.table() -->\n")
    assert rest.partition("\n<!-- end of names -->")[0] == table()


def test_what_is_to_be_installed_can_be():
    """Until there is a release, pip finds kvabr and its laboratory in a clone alone."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [
        *DOCS,
        *(ROOT / "docs").rglob("Dockerfile*"),
        *TOOLS,
        ROOT / "CONTRIBUTING.md",
        ROOT / "tools/lab/README.md",
    ]
    texts += [path for folder in ("kvabr", "tools/lab") for path in (ROOT / folder).rglob("*.py")]
    count = 0
    for path in texts:
        for line in re.findall(r"pip install[^\n`)]*", path.read_text()):
            assert not re.search(r"kvabr-lab|kvabr\[", line), f"{path}: {line}"
            for extras in re.findall(r"(?:\.|src)\[([\w,]+)\]", line):
                assert set(extras.split(",")) <= set(known), f"{path}: {line}"
            for folder in re.findall(r"(?<=[ '\"])(?:\./)?tools/lab", line):
                assert (ROOT / folder / "pyproject.toml").is_file()
            count += 1
    assert count > 20
    assert installing.MODEL.startswith("pip install -c constraints.txt '.[model]' ")
    assert (ROOT / "constraints.txt").is_file()


def test_disk_space_in_the_answers_is_that_of_the_shipped_catalog():
    nbytes = {track.name: sum(track.bytes) for track in default_catalog().tracks}
    layers = sum(size for name, size in nbytes.items() if name.startswith("AC-L"))
    published = nbytes["FP16"] + nbytes["Int8"] + nbytes["Int4"] + layers
    text = (ROOT / "docs" / "faq.md").read_text()
    (small, fast, whole) = re.search(r"\| 1/([\d.]+) \|(?:.|\n)*?\| ([\d.]+) \|(?:.|\n)*?\| ([\d.]+) \|", text).groups()
    assert float(small) == pytest.approx(nbytes["FP16"] / layers, rel=0.03)
    assert float(fast) == pytest.approx(published / nbytes["FP16"], rel=0.03)
    assert float(whole) == pytest.approx(sum(nbytes.values()) / nbytes["FP16"], rel=0.03)


def test_the_front_page_counts_the_policies():
    said = re.search(r"compares it with the (\d+) that come with kvabr", (ROOT / "docs" / "index.md").read_text())
    assert int(said[1]) == len(policies())


def test_figures_of_the_readme_are_in_its_pages():
    """What is measured anew is said anew; those of the picture, in front of it, have a test of their own."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 130
    text = "".join((ROOT / "docs" / page).read_text() for page in ("benchmarks.md", "design/codec.md", "faq.md"))
    figures = re.findall(r"(?<![\w.,/-])\d[\d,]*\.\d+(?![\w.]*\d)", readme.partition("![")[2])
    assert len(figures) > 20
    missing = {each for each in figures if not re.search(rf"(?<![\d.]){re.escape(each)}(?!\d)", text)}
    assert missing <= {"3.11"}  # Python's version


def test_the_readme_has_vllms_figure_from_the_calculator():
    entries = json.loads((ROOT / "docs" / "assets" / "calculator.json").read_text())
    entry = next(entry for entry in entries if entry["name"] == "70B, H200")
    way = next(way for way in entry["ways"] if "vLLM" in way["title"])
    found = re.search(
        r"With kvabr in vLLM the first token arrives after ([\d.]+) s over", (ROOT / "README.md").read_text()
    )
    index = entry["tokens"].index(32768) * len(entry["mbit"]) + entry["mbit"].index(1000)
    assert float(found[1]) == pytest.approx(way["seconds"][index], abs=0.006)


@functools.cache
def exists(name: str) -> bool:
    """Return whether a dotted name is a module of kvabr or its laboratory, or is bound in one; nothing is imported."""
    home, _, last = name.rpartition(".")
    root = ROOT / "tools" / "lab" if name.startswith("kvabr_lab") else ROOT
    place = root / name.replace(".", "/")
    if place.is_dir() or any(place.with_suffix(ending).is_file() for ending in (".py", ".c")):
        return True
    folder = root / home.replace(".", "/")
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not source.is_file():
        return "." in home and exists(home)  # a member of a class
    return last in bound(source)


@functools.cache
def bound(source: Path) -> set[str]:
    """Return the names that a module binds."""
    found = set[str]()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found
