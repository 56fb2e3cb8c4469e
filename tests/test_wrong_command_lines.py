"""Wrong words on the command line end in a line or two that say what is wrong, whatever command and option they are of.

Every option that a parser declares is tried, also those that come tomorrow. A command's other words are right, but for
one: a model, an address or a policy that cannot be had stops it before it computes, fetches or serves for long.

All that is said stands in `data/messages.txt`, for people to read. ``KVABR_MESSAGES=write`` writes that file again.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import re
import shlex
import signal
import socket
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from kvabr.cli import main as cli
from kvabr.cli.commands import names
from kvabr.cli.main import command_parser, main
from tests.catalogs import catalog
from tests.examples import PROFILE
from tests.toymodel import toy_asset

ROOT = Path(__file__).parent.parent
TRACES = ROOT / "traces"
FEW = 3
"""Values that an option is tried with in a quick run, or if one of its name and type was tried with every value: of all
options together, every value."""
SLOW = {"doctor"}
"""Commands that look at everything else first: each option has few values in every run."""
LONG_S = 60
GOLDEN = Path(__file__).parent / "data" / "messages.txt"
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
    asset, offer, text = str(folder / "assets" / "one"), str(folder / "catalog.json"), str(folder / "text")
    trace, out, model = str(TRACES / "flat.csv"), str(folder / "out"), str(folder / "nosuch-model")
    store, name = str(folder / "assets"), "one"
    url = f"file://{folder}/bucket"
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
    *(f"store {name}" for name in ("ls", "rm", "verify", "copy")),
    *(f"bench {name}" for name in ("quality", "rd", "blend", "codec")),
)

LINES = """
{dance|--dance|--|replya traces|fetch|bench x|replay x --recompute-mode both}
replay {MISSING|EMPTY|FOLDER|-d 2s|--deadline 500ms|--starts many|-j x|--polcy=mpc}
replay TRACE --policy {MISSING.py:X|bad.py:X|late.py:Late|nosuch|anytme|fixed|fixed:MP3|fixed:int8|fixed:AC5x}
replay TRACE --asset {MISSING|newer.json}
replay TRACE {--estimator nosuch|--deadline -1|--load 0|--time-price -0.1|--rtt -5|--starts 0|--prefill-rate 0}
replay TRACE {--json /no/such/folder/out.json|--verify|--live|--loss 1|--queue 0.1|--cold --no-slow-start}
replay TRACE {--producer 0|--producer 1 --cold|--producer 1 --prefill-rate 100}
replay TRACE --live --asset ASSET {--loss 100|--queue 0.1|--decode-scale 0|--rivals 2|--producer 1}
lab {MISSING|m.toml m.toml|TRACE --load much} --out out
{report FOLDER|inspect MISSING|inspect FOLDER|serve MISSING --dev}
fetch moqt://127.0.0.1:1/ {--prompt MISSING|--prompt EMPTY|--text blank --model smollm2}
fetch moqt://127.0.0.1:1/#kvcache:m/0 --token-file EMPTY
encode --text {MISSING|EMPTY|blank} --tokens 9 --out x
route -n {0 --link 10|5 --link -1|5 --link 1 2|5 --link 1 --link-bound 2}
route -n 5 --link 1 {--rtt -1|--local fast|--remote 1,2|--local 0|--deadline 0|--decoders 0|--kv-bytes 0}
route -n 5 --link 1 {--floor -1|--local-queue -1|--asset /no/such}
route --day --link {0|5 -n 7|5 --requests 0|5 --workers 0 1|5 --oracle -1|5 --trace /no/such}
route --link 5 {--tail|--remote-events tcp://127.0.0.1:1|--prompt prompt|--prompt prompt --local-events x}
route --link 5 --prompt prompt --local-events tcp://127.0.0.1:1 {--listen 0|-n 4}
crowd --asset OFFER {--edge ngnix|--middle nginx|--edges 0}
tune cachegen TRACE --asset OFFER --out out --jobs 1
traces info /nowhere
traces synth constant --mean-mbps {x|0} --duration 1 --out x
traces synth constant --mean-mbps 1 --duration 1 --out {/nowhere/x|x --name ../x}
store {ls MISSING|ls STORE --json /nowhere/out.json|copy STORE xyz://nowhere|rm STORE|rm STORE nosuch}
bench rd --model MISSING {--contexts 0|--continuation 1|--retrieval -1|--group-tokens 0|--group-tokens 128 128}
bench rd --model MISSING {--domains klingon|--target-kl 0.1|--calibrate 0|--calibrate 2 --profile some}
bench rd --model MISSING --calibrate 2 {--target-track AC-L0|--target-kl 0.1 --target-track Int4|--target-kl 2}
bench rd --model MISSING --calibrate 2 --step-scale 1 1
bench blend --model MISSING {--prompts 0|--shares 0|--selectors nosuch|--tracks nosuch}
bench codec {--seconds 0|--tracks FP17}
"""
"""Command lines that are wrong as a whole, or in a way that no list of values has: one of what is in braces each."""
CONFIGS = (
    "[fetch]\ndeadlin = 2",
    "[fetch]\nxyzzy = 2",
    "[fetch]\nhelp = true",
    "[fetch]\nurl = 'moqt://x/'",
    "[fetch]\ndeadline = '2s'",
    "[fetch]\ndeadline = [1, 2]",
    "[fetch]\ndeadline = true",
    "[fetch]\ninsecure = 1",
    "[fetch]\nquic = 'tcp'",
    "[fetch]\nca = 'a'\nfingerprint = 'b'",
    "[fetch.more]\nx = 1",
    "[calibrate]\nkept = [1, 2, 3]",
    "[replay]\npolicy = []",
    "[fetsh]\ndeadline = 2",
    "deadline = 2",
    "[fetch\n",
    "[fetch]\nx = " + "{a = " * 5000,
)
"""Configuration files that are wrong; those of `fetch` or of none are read by it."""
LATE = "from kvabr.abr import Policy\n\nclass Late(Policy):\n    def decide(self, view):\n        return 1 / 0\n"


class Place:
    """A folder with what the commands need, and what it says there."""

    def __init__(self, folder: Path, port: int) -> None:
        (folder / "catalog.json").write_text(catalog(2).dumps())
        (folder / "text").write_text("some words " * 200)
        toy_asset(folder / "assets" / "one")
        self.folder, self.work, self.port = folder, folder / "cwd", port
        (self.work / "FOLDER").mkdir(parents=True)
        for name, text in {
            "EMPTY": "", "blank": " \n", "prompt": "[1, 2, 3]", "late.py": LATE, "m.toml": "",
            "bad.py": "from kvabr.abr import Policy\nclass X(Policy:\n    pass\n",
            "newer.json": catalog(2).dumps().replace("kvabr.catalog/1", "kvabr.catalog/9"),
        }.items():  # fmt: skip
            (self.work / name).write_text(text)
        self.paths, self.right = paths(folder), right(folder, port)
        self.named = {"TRACE": TRACES / "flat.csv", "OFFER": folder / "catalog.json", "STORE": folder / "assets"}
        self.named["ASSET"] = folder / "assets" / "one"

    def line(self, text):
        return [str(self.named.get(word, word)) for word in shlex.split(text)]

    def plain(self, said, command, option="", value=""):
        """Return a message without what differs from machine to machine, option to option and value to value."""
        forms = {value, value.strip(), repr(value)[1:-1], str(Path(value)), value.rstrip("/")}
        with contextlib.suppress(ValueError, OverflowError):
            forms |= {str(float(value)), f"{float(value):g}"}
            forms |= {str(int(float(value))), f"{int(float(value)):,}", f"{int(value):,}"}

        def printable(text):
            return "".join(one if one.isprintable() else "?" for one in text)

        said = printable(said)
        for form in sorted(map(printable, forms), key=len, reverse=True):
            if form in said and form.strip(" -."):
                said = re.sub(rf"(?<![\w.]){re.escape(form)}(?![\w.]|:\d)", "VALUE", said)
        if not value.strip(" -"):
            said = re.sub(rf"'{re.escape(value)}'|(?<=kvabr: ){re.escape(str(Path(value)))}(?=:)", "VALUE", said)
        # Some messages cut a value after 40 characters, within or behind this folder's path.
        cut = str(self.folder)[:40]
        said = re.sub(r"'(/[^']{39})'", lambda one: "'DIR'" if one[1].startswith(cut) else one[0], said)
        for own, name in ((str(self.folder), "DIR"), (str(ROOT), "REPO"), (f":{self.port}", ":PORT")):
            said = said.replace(own, name)
        said = re.sub(rf"kvabr {command}(?=:| --help)", "kvabr COMMAND", said)
        if option:
            said = re.sub(rf"(?:-\w/)?{option}(?![\w-])|(?<=kvabr: ){option.strip('-').lower()}(?=:)", "OPTION", said)
        said = re.sub(r"\(choose from .*?\)", "(choose from ...)", said)
        # Python, torch and the system say these, each in its own words.
        said = re.sub(r"(?<=not JSON |not TOML )\((?!JSON).*\)|\(Expected one of .*?\)|\(Name or .*?\)", "(...)", said)
        return said if len(said) <= 300 else f"{said[:300]} ..."


@pytest.fixture(scope="module")
def place():
    before = Path.cwd()
    with (
        pytest.MonkeyPatch.context() as patch,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken,
        tempfile.TemporaryDirectory() as folder,  # as long a path with several pytest processes as with one
    ):
        # Each line reads the entry points of all that is installed, which never change here.
        patch.setattr(importlib.metadata, "entry_points", functools.cache(importlib.metadata.entry_points))
        patch.setattr(cli, "command_parser", functools.cache(command_parser))  # a third of what a line takes
        taken.bind(("127.0.0.1", 0))
        long = Path(folder) / "longer-than-what-messages-show-of-a-value"
        long.mkdir(mode=0o700)
        made = Place(long, taken.getsockname()[1])
        os.chdir(made.work)  # what a wrong word names is made there
        bucket = f"file://{made.folder}/bucket"
        assert main(["store", "copy", str(made.named["STORE"]), bucket]) == 0
        yield made
        os.chdir(before)


def parser_of(name):
    """Return the parser of a command, or of a command's action."""
    parser = command_parser(name.split()[0])
    for action in name.split()[1:]:
        parser = next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction)).choices[action]
    return parser


def lines(place):
    """Yield command, option, value and words of command lines with one wrong word each."""
    turn, done = 0, set()
    for name in NAMES:
        words = place.right[name]
        taking = [one for one in parser_of(name)._actions if one.nargs != 0 and one.help != argparse.SUPPRESS]
        places = [one.dest for one in taking if not one.option_strings]
        for option in taking:
            words_too = (*WORDS, *place.paths)
            values = place.paths if option.type is Path else NUMBERS if option.type is not None else words_too
            if option.choices is not None:
                values = ("nosuch", "", "\0")
            if PROFILE == "fast" or name in SLOW or (option.dest, option.type) in done:
                values = [values[at % len(values)] for at in range(turn, turn + FEW)]
                turn += FEW
            else:
                done.add((option.dest, option.type))
            for value in values:
                if option.option_strings:
                    given = [option.option_strings[-1], value, value]
                    given = given if option.nargs == 2 else [f"{given[0]}={value}"]
                    yield name, given[0].partition("=")[0], value, [*name.split(), *words, *given]
                else:
                    at = places.index(option.dest)
                    yield name, option.dest.upper(), value, [*name.split(), *words[:at], value, *words[at + 1 :]]


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
    """Run a command line; return what is wrong with how it ended, or None, its status, and what it said."""
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(LONG_S)
    try:
        status = status_of(argv)
    except BaseException as error:  # noqa: BLE001 - this is what is looked for
        return f"raised {error!r}", None, []
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    out, err = capfd.readouterr()
    said = [line for line in err.splitlines() if not line.startswith("{")]  # but for the log
    if status not in {0, 1, 2} or "Traceback" in out + err:
        return f"status {status}, {err[-500:]}", status, said
    if status and argv[0] != "doctor" and not (len(said) in {1, 2} and said[-1].startswith("kvabr")):
        return f"status {status}, it says {err[:500]!r}", status, said
    return None, status, said


def test_every_command_is_here(place):
    assert set(NAMES) == place.right.keys()


def test_wrong_words_are_told_in_a_line_or_two(place, capfd, monkeypatch):
    faults, seen, told = [], set(), defaultdict(lambda: defaultdict(list))

    def check(command, what, argv, option="", value=""):
        fault, status, said = tried(argv, capfd)
        message = f"{status} {place.plain(' '.join(said), command, option, value)}"
        if fault is not None:
            faults.append(f"{json.dumps(argv)[:300]}: {fault}")
        elif status and command not in SLOW and value not in elsewhere and message not in seen:
            seen.add(message)
            told[command][what].append(message)

    elsewhere = {str(place.folder / "wrong" / "closed"), "/proc/self/mem", "/dev/full", "file:///nosuch"}
    for name, option, value, argv in lines(place):
        check(name, option, argv, option, value)
    for before, among, after in re.findall(r"(?m)^([^{\n]*)(?:\{(.*)\})?(.*)$", LINES.strip()):
        for one in among.split("|"):
            line = f"{before}{one}{after}"
            check("as a whole", f"kvabr {line}", place.line(line))
    for text in CONFIGS:
        cli.command_parser.cache_clear()  # a file changes a parser's defaults
        Path("given.toml").write_text(text)
        monkeypatch.setenv("KVABR_CONFIG", "given.toml")
        found = re.match(r"\[(replay|calibrate)\]", text)
        argv = [found[1]] if found else ["fetch", "moqt://origin.example/"]
        check("kvabr.toml", repr(text)[1:41], argv)
    assert not faults, "\n".join(faults)
    if PROFILE == "fast":  # some messages have not been said
        return
    text = "What the command line says of wrong words: each message with its status, where it was first seen.\n"
    for command, options in told.items():
        text += f"\n## {command}\n"
        for what, messages in options.items():
            text += "".join(f"{line}\n" for line in (what, *(f"    {message}" for message in messages)))
    if os.environ.get("KVABR_MESSAGES") == "write":
        GOLDEN.write_text(text, encoding="utf-8")
    assert GOLDEN.read_text(encoding="utf-8") == text, "write it again with KVABR_MESSAGES=write, and read what changed"
