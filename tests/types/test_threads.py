"""Threads that read the same kinds of records for the first time at the same moment, in processes that know none yet.

``KVABR_RACE_PROCESSES=2000`` tries as many processes.
"""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

import kvabr
from kvabr.types.errors import FormatError
from kvabr.types.once import once
from kvabr.types.records import built

PROCESSES = int(os.environ.get("KVABR_RACE_PROCESSES", "2"))

CHILD = """
import json, sys, threading, time
from contextlib import suppress
from importlib import import_module

from kvabr.types import records
from kvabr.types.errors import FormatError

kinds = [getattr(import_module(module), name) for module, name in json.loads(sys.argv[1])]
threads, done = 4, []
go = threading.Barrier(threads)
sys.setswitchinterval(1e-6)

def yield_inside(_frame, event, _argument):
    if event == "call":
        time.sleep(0)  # another thread goes on while msgspec works out a type

def read(turn):
    sys.setprofile(yield_inside)
    for kind in kinds:
        go.wait()
        ways = (
            lambda: records.decode(b"{}", kind, "record"),
            lambda: records.convert({}, kind, "record"),
            lambda: records.message_decoder(kind).decode(bytes([0x80])),
            lambda: records.read(b"{}", kind, "record"),
        )
        for way in ways[turn % 4 :] + ways[: turn % 4]:
            with suppress(FormatError, records.msgspec.MsgspecError, TypeError):  # fields are missing
                way()
    done.append(turn)

running = [threading.Thread(target=read, args=(turn,)) for turn in range(threads)]
for thread in running:
    thread.start()
for thread in running:
    thread.join()
sys.exit(0 if len(done) == threads else 3)
"""


def _record_modules() -> list[str]:
    root = Path(kvabr.__file__).parent
    found = [
        path
        for path in sorted(root.rglob("*.py"))
        if "msgspec" in (text := path.read_text()) or "records import" in text
    ]
    return [".".join(path.relative_to(root.parent).with_suffix("").parts) for path in found]


def _is_record(kind: object) -> bool:
    if not isinstance(kind, type) or not (is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        return False
    try:
        built(kind)
    except (TypeError, NameError, FormatError):  # it has a field that is no JSON: it is no record
        return False
    return True


def _records() -> list[tuple[str, str]]:
    """Return every kind of record in kvabr, as the module and the name."""
    return [
        (module, name)
        for module in _record_modules()
        for name, kind in vars(import_module(module)).items()
        if getattr(kind, "__module__", None) == module and _is_record(kind)
    ]


def test_every_record_may_be_read_by_several_threads_first():
    kinds = _records()
    assert {"Catalog", "LiveCatalog", "KVBlocksStored"} <= {name for _, name in kinds}
    died = 0
    for _ in range(PROCESSES):
        command = [sys.executable, "-c", CHILD, json.dumps(kinds)]
        ended = subprocess.run(command, check=False)  # noqa: S603  # the child above
        died += ended.returncode != 0
    assert died == 0, f"{died} of {PROCESSES} processes"


def test_threads_that_want_it_first_get_the_same():
    built, go = [], threading.Barrier(8)

    @once
    def thing(name):
        built.append(name)
        time.sleep(0.01)  # others come meanwhile
        return object()

    def want(name):
        go.wait()
        return thing(name)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(want, ["a", "b"] * 4))
    assert sorted(built) == ["a", "b"]
    assert len(set(map(id, found))) == 2
    assert thing("a") is found[0]


def test_an_error_is_raised_and_tried_again():
    tried = []

    @once
    def thing():
        tried.append(1)
        if len(tried) == 1:
            raise KeyError("not yet")
        return len(tried)

    with pytest.raises(KeyError):
        thing()
    assert thing() == thing() == 2
