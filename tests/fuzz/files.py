"""Files: what an asset, an operator or an earlier run has left on a disk, and traces from anywhere."""

import argparse
import base64
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvabr.cli.config import VARIABLE, Config
from kvabr.cli.options import CommandParser, read_tokens
from kvabr.client import memory
from kvabr.client.memory import SCHEMA, MachineFile
from kvabr.client.prefill_timings import read_rows
from kvabr.replay import readers
from kvabr.server.grants import Grants
from kvabr.store.encrypted import KEY_BYTES, read_key
from kvabr.store.prompt import Prompt
from kvabr.types.errors import FormatError, TraceError, UsageError
from kvabr.types.peer import read_token
from kvabr_lab import results_folder
from kvabr_lab.causes import CAUSES
from kvabr_lab.cli.traces import describe, dumps, sparkline
from kvabr_lab.matrix import read_toml
from tests.fuzz.target import Target, family, refused


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvabr-fuzz-")


def folder(name: str) -> Path:
    """Return a folder of this process that is there."""
    path = Path(_folder().name, name)
    path.mkdir(exist_ok=True)
    return path


def _file(data: bytes, name: str = "file") -> Path:
    path = Path(_folder().name, name)
    path.write_bytes(data)
    return path


def _prompt(data: bytes) -> bool:
    found = refused(lambda: Prompt.loads(data), FormatError)
    if found is None:
        return False
    assert Prompt.loads(found.dumps()) == found
    assert found.sealed("name").is_sealed_for("name")
    return True


def _tokens(data: bytes) -> bool:
    found = refused(lambda: read_tokens(_file(data), "--prompt"), FormatError, UsageError)
    return bool(found)


def _grants(data: bytes) -> bool:
    found = refused(lambda: Grants.loads(data), FormatError)
    if found is None:
        return False
    for grant in found:
        assert found.renewed(grant) == grant
        grant.may_read("team-a/asset", "model")
        grant.expired(1e9)
    found.check(b"token")
    return True


def _token(data: bytes) -> bool:
    found = refused(lambda: read_token(_file(data)), UsageError)
    assert found is None or (found.isprintable() and found == found.strip())
    return found is not None


def _key(data: bytes) -> bool:
    found = refused(lambda: read_key(_file(data)), UsageError)
    assert found is None or len(found) == KEY_BYTES
    return found is not None


def _sealed(schema: str, name: str, identity: dict[str, Any], inner: bytes) -> bytes:
    """Return a file with this content and the right checksum, if the content is JSON: else no input would pass it."""
    try:
        value = json.loads(inner)
    except (ValueError, RecursionError):
        return inner
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return json.dumps({"schema": schema, **identity, "sha256": digest, name: value}).encode()


def _peers(data: bytes) -> bool:
    found = _kept(data, memory.PeerHistory())
    for record in (found or {}).values():
        record.prior(record.at + 1.0)
        assert record.with_play(record).sound()
    return found is not None


def _kept(data: bytes, file: MachineFile[Any]) -> dict[str, Any] | None:
    text = _sealed(SCHEMA, file.table, {file.owner: file.identity()}, data)
    found = refused(lambda: file.loads(text.decode("utf-8", "replace")), FormatError)
    assert found is None or file.loads(file.dumps(found)) == found
    return found


def _speeds(data: bytes) -> bool:
    return _kept(data, MachineFile(None, "decode_rates", memory._tracks)) is not None


def _costs(data: bytes) -> bool:
    return _kept(data, MachineFile(None, "prefill_costs", read_rows)) is not None


def _config(data: bytes) -> bool:
    before = os.environ.get(VARIABLE, "")
    os.environ[VARIABLE] = str(_file(data, "kvabr.toml"))
    try:
        config = refused(Config.read, UsageError)
        if config is None:
            return False
        return refused(lambda: config.apply(_parser(), "fetch") or True, UsageError) is not None
    finally:
        os.environ[VARIABLE] = before


def _parser() -> argparse.ArgumentParser:
    """Return a parser with an option of each kind."""
    parser = CommandParser(prog="kvabr fetch")
    parser.add_argument("--deadline", "-d", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--policy", nargs="+", choices=("a", "b"))
    parser.add_argument("--limit", action="append", type=int)
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--text")
    one.add_argument("--prompt", nargs=2, type=int)
    parser.add_subparsers().add_parser("codec").add_argument("--json")
    return parser


def _matrix(data: bytes) -> bool:
    return refused(lambda: read_toml(_file(data, "matrix.toml")), UsageError) is not None


def _result(data: bytes) -> bool:
    line = results_folder._sound(data.decode("utf-8", "replace"))
    assert line is None or results_folder._sound(json.dumps(line, allow_nan=False)) == line
    return line is not None


def _valid_results() -> list[bytes]:
    line: dict[str, Any] = dict.fromkeys(("trace", "trace_family", "policy"), "x")
    line |= dict.fromkeys(results_folder._NUMBERS, 1.0) | dict.fromkeys(results_folder._MAYBE)
    line |= dict.fromkeys(results_folder._FLAGS, True) | {"track_tokens": {"a": 5}, "gave_up": None}
    causes = {"regret": 0.5, "causes": dict.fromkeys(CAUSES, 0.0)}
    return [
        json.dumps(each).encode()
        for each in (line | causes, line | {"feasible": False, "regret": None, "causes": None})
    ]


def _traces(name: str) -> Callable[[bytes], bool]:
    """Return what reads a file by its content, and as each format."""

    def take(data: bytes) -> bool:
        path = _file(data, name)
        refused(lambda: readers.sniff(path), TraceError)
        found = refused(lambda: readers.read(path), TraceError)
        for format_name in readers.FORMATS:
            refused(lambda: readers.read(path, format_name=format_name), TraceError)  # noqa: B023  # at once
        for trace in found or ():
            again = _file(dumps(trace).encode(), "again.csv")
            assert readers.read(again) == [trace]
            assert len(sparkline(trace)) == 24
            assert all(not isinstance(each, float) or math.isfinite(each) for each in describe(trace).values())
        return found is not None

    return take


def _valid_traces() -> list[bytes]:
    sums = b'{"start": 0, "end": 1, "seconds": 1, "bits_per_second": 1e7, "omitted": false}'
    return [
        b"# kvabr.trace/1\n# name: lte/walk\n# family: lte\n# rtt_s: 0.05\ntime_s,bits_per_second\n0,12e6\n3,end\n",
        b"0\n0\n1\n4\n",
        b"0 1.5\n1 2.25\n3.5 0\n",
        b"6.21,Mbits/sec\n17,Kbits/sec\n",
        b"time,throughput_mbps\n2026-01-31 12:00:00,1.5\n2026-01-31 12:00:01,2\n2026-01-31 12:09:01,4\n",
        b"start_ms;end_ms;dl_kbps\n0;500;12\n500;1000;7\n90000;90500;7\n",
        b'[{"duration_ms": 1000, "bandwidth_kbps": 500, "latency_ms": 20}]',
        b'{"start": {}, "intervals": [{"streams": [{"rtt": 5000}], "sum": %s}]}' % sums,
    ]


FILES = family(
    Target(_prompt, lambda: [Prompt((1, 2, 3), (4,)).dumps().encode(), Prompt((1,), ()).sealed("x").dumps().encode()]),
    Target(_tokens, lambda: [b"[1, 2, 3]", b'{"tokens": [5]}']),
    Target(
        _grants,
        lambda: [
            b'{"schema": "kvabr.grants/1", "grants": [{"name": "a", "id": "a.2", "token_sha256": "' + b"ab" * 32 + b'",'
            b' "assets": ["team-a/*"], "models": ["*"], "expires": "2027-01-31T12:00:00Z"}]}',
            b'{"schema": "kvabr.grants/1", "grants": []}',
        ],
    ),
    Target(_token, lambda: [b"secret\n"]),
    Target(_peers, lambda: [b'{"h:1": {"rate": 1e6, "ttfb_s": 0.1, "at": 1e9}}', b"{}"]),
    Target(_speeds, lambda: [b'{"key": {"Int4": 1e-06, "AC-L0": 0.5}}', b"{}"]),
    Target(_costs, lambda: [b'{"key": [[0, 512, 0.02], [512, 128, 0.01]]}', b"{}"]),
    Target(
        _config,
        lambda: [
            b'[fetch]\ndeadline = 0.5\nout = "a/b"\nverify = true\npolicy = ["a", "b"]\nlimit = [1, 2]\n',
            b"[fetch]\nprompt = [1, 2]\n",
            b'[fetch]\ntext = "x"\n[fetch.codec]\njson = "f"\n[bench]\n',
        ],
    ),
    Target(
        _matrix,
        lambda: [b'traces = ["a.csv"]\npolicies = ["mpc", "x.py:A"]\nassets = ["b"]\n[families]\nlte = ["c"]\n'],
    ),
    Target(_result, _valid_results),
    Target(_key, lambda: [b"ab" * 32 + b"\n", bytes(range(32)), base64.b64encode(bytes(32))]),
)
TRACES = Target(_traces("trace.txt"), _valid_traces)
