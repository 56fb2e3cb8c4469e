"""Wrong words on the command line end in a line or two that say what is wrong, whatever command and option they are of.

Every option that a parser declares is tried, also those that come tomorrow. A command's other words are right, but for
one: a model, an address or a policy that cannot be had stops it before it computes, fetches or serves for long.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
from itertools import count
from pathlib import Path

import pytest

from kvabr.cli.commands import names
from kvabr.cli.main import command_parser, main
from tests.catalogs import catalog
from tests.examples import PROFILE
from tests.toymodel import toy_asset

TRACES = Path(__file__).parent.parent / "traces"
FEW = 3
"""Values that an option is tried with in a quick run, or if one of its name and type was tried with every value: of all
options together, every value."""
SLOW = {"doctor"}
"""Commands that look at everything else first: each option has few values in every run."""
LONG_S = 60
NUMBERS = ("-1", "nan", "1" + "0" * 30, "inf", "x", "0", "1e30", "-inf", "", "1.5", "1e999", "1" + "0" * 5000)
WORDS = (
    "", "nosuch", "-1", "9" * 5000, "moqt://[", "nan", "s3://", "a:b:c@d", "http://[", " ", "[::1", "x/../..", "0",
    "\0", "moqt://x:0/", "é\udcff", "a=b", "moqt://a b/", "file:///nosuch", "shm:///", "127.0.0.1:99999", "nosuch://x/",
    "1e30", "moqt://x/#kvcache:x", "moqt://", "shm://", "[x]:1", "[",
)  # fmt: skip


def paths(folder):
    """Return paths that are wrong for every command that reads or writes."""
    made = folder / "wrong"
    made.mkdir()
    (made / "binary").write_bytes(bytes(range(256)) * 40)
    (made / "empty").touch()
    (made / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (made / "list.json").write_text("[1, 2]")
    (made / "deep.json").write_text("[" * 100_000)
    (made / "huge.json").write_text('{"schema": 1, "tokens": [%s]}' % ("9" * 5000))
    (made / "closed").touch(0o000)
    (made / "link").symlink_to(made / "link")
    wrong = ["", "\0", "-", str(made), *(str(path) for path in sorted(made.iterdir()))]
    wrong += [str(made / "missing"), str(made / "missing" / "too"), str(made / "empty" / "below"), "n" * 300]
    return [*wrong, *(name for name in ("/proc/self/mem", "/dev/full") if Path(name).exists())]


def right(folder, port):
    """Return right words of every command."""
    asset, offer, text = str(folder / "assets" / "one"), str(folder / "catalog.json"), str(folder / "text")
    trace, out, model = str(TRACES / "flat.csv"), str(folder / "out"), str(folder / "nosuch-model")
    store, name = str(folder / "assets"), "one"
    url = f"file://{folder}/bucket?layout=objects"
    return {
        "demo": ["--deadline", "0", "--html", str(folder / "nowhere" / "x")],
        "doctor": [url],
        "encode": ["--text", text, "--tokens", "64", "--out", out, "--model", model],
        "prefill": ["--text", text, "--out", out, "--model", model, "--live"],
        "inspect": [asset],
        "calibrate": ["--text", text, "--out", out, "--model", model],
        "serve": [store, "--dev", "--bind", f"127.0.0.1:{port}"],
        "relay": ["--upstream", url, "--dev", "--bind", f"127.0.0.1:{port}"],
        "player": ["--socket", str(folder / "own" / "p.sock"), "--idle", "0.1"],
        "fetch": [url, "--name", "m/" + "0" * 64, "--cache", str(folder)],
        "replay": [trace, "--asset", offer, "--deadline", "1", "--load", "0.4", "--jobs", "1"],
        "route": ["--tokens", "1000", "--link", "8", "--rtt", "10"],
        "lab": [trace, "--asset", offer, "--policy", "cheapfirst", "--load", "0.4", "--jobs", "1", "--out", out],
        "crowd": ["--players", "3", "--asset", offer, "--policy", "nosuch"],
        "tune": ["cheapfirst", trace, "--asset", offer, "--out", out, "--jobs", "1"],
        "report": [str(folder / "nowhere")],
        "policies": [],
        "estimators": [],
        "selectors": [],
        "engines": [],
        "traces info": [trace],
        "traces import": [trace, "--out", out],
        "traces synth": ["markov", "--mean-mbps", "3", "--duration", "3", "--out", out],
        "store ls": [store],
        "store du": [store],
        "store rm": [store, name],
        "store verify": [store],
        "store copy": [store, str(folder / "copy")],
        "bench quality": ["--text", text, "--model", model],
        "bench rd": ["--texts", str(folder / "nowhere"), "--model", model],
        "bench blend": ["--texts", str(folder / "nowhere"), "--model", model],
        "bench codec": ["--models", model],
        "completion": ["bash"],
    }  # fmt: skip


NAMES = (
    *(name for name in names() if name not in {"traces", "store", "bench"}),
    *(f"traces {name}" for name in ("info", "import", "synth")),
    *(f"store {name}" for name in ("ls", "du", "rm", "verify", "copy")),
    *(f"bench {name}" for name in ("quality", "rd", "blend", "codec")),
)
_turn = count()
_tried: set[tuple[str, object]] = set()
"""Names and types of the options that were tried with every value."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make what the commands need; return the wrong paths, and all commands' right words."""
    folder, before = tmp_path_factory.mktemp("commands"), Path.cwd()
    (folder / "catalog.json").write_text(catalog(2).dumps())
    (folder / "text").write_text("some words " * 200)
    toy_asset(folder / "assets" / "one")
    (work := folder / "work").mkdir()
    os.chdir(work)  # what a wrong word names is made there
    assert main(["store", "copy", str(folder / "assets"), f"file://{folder}/bucket?layout=objects"]) == 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        yield paths(folder), right(folder, taken.getsockname()[1])
    os.chdir(before)


def parser_of(name):
    """Return the parser of a command, or of a command's action."""
    parser = command_parser(name.split()[0])
    for action in name.split()[1:]:
        parser = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction)).choices[action]
    return parser


def lines(name, words, wrong_paths, few):
    """Yield command lines with one wrong word each."""
    taking = [one for one in parser_of(name)._actions if one.nargs != 0 and one.help != argparse.SUPPRESS]
    places = [one.dest for one in taking if not one.option_strings]
    for option in taking:
        words_too = (*WORDS, *wrong_paths)
        values = wrong_paths if option.type is Path else NUMBERS if option.type is not None else words_too
        if option.choices is not None:
            values = ("nosuch", "", "\0")
        if few or (option.dest, option.type) in _tried:
            values = [values[next(_turn) % len(values)] for _ in range(FEW)]
        else:
            _tried.add((option.dest, option.type))
        for value in values:
            if option.option_strings:
                given = [option.option_strings[-1], value, value]
                yield [*name.split(), *words, *(given if option.nargs == 2 else [f"{given[0]}={value}"])]
            else:
                at = places.index(option.dest)
                yield [*name.split(), *words[:at], value, *words[at + 1 :]]


def status_of(argv):
    try:
        return main(argv)
    except SystemExit as ended:
        return ended.code


class HangsError(BaseException):
    """It has not ended after `LONG_S`."""


def hangs(*_):
    raise HangsError


def tried(argv, capfd):
    """Run a command line; return what is wrong with how it ended, or None."""
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LONG_S)
    try:
        status = status_of(argv)
    except BaseException as error:  # noqa: BLE001 - this is what is looked for
        return f"raised {error!r}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    out, err = capfd.readouterr()
    said = [line for line in err.splitlines() if not line.startswith("{")]  # but for the log
    if status not in {0, 1, 2} or "Traceback" in out + err:
        return f"status {status}, {err[-500:]}"
    if status and argv[0] != "doctor" and not (len(said) in {1, 2} and said[-1].startswith("kvabr")):
        return f"status {status}, it says {err[:500]!r}"
    return None


def test_every_command_is_here(place):
    assert set(NAMES) == place[1].keys()


@pytest.mark.parametrize("name", NAMES)
def test_wrong_words_are_told_in_a_line_or_two(name, place, capfd):
    wrong_paths, words = place
    tries = lines(name, words[name], wrong_paths, few=PROFILE == "fast" or name in SLOW)
    found = [(argv, fault) for argv in tries if (fault := tried(argv, capfd))]
    assert not found, "\n".join(f"{json.dumps(argv)[:300]}: {fault}" for argv, fault in found)
