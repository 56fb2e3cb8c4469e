"""A process may end right after its last request to an object store."""

import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

SCRIPT = """
import asyncio, selectors, sys, time
from kvabr.store.blocking import blocked
from kvabr.store.cloud import CloudStore

wake = asyncio.SelectorEventLoop._write_to_self
def slowly(loop):  # as if the thread that wakes the loop were interrupted there
    wake(loop)
    time.sleep(0.003)
asyncio.SelectorEventLoop._write_to_self = slowly
print(bytes(blocked(CloudStore(sys.argv[1]).get("g/x", limit=100))))
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_process_ends_well_right_after_a_request(tmp_path):
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "x").write_bytes(b"bytes")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        ended = subprocess.run(  # noqa: S603
            [sys.executable, "-c", SCRIPT, url], check=False, capture_output=True, text=True, timeout=120
        )
    finally:
        server.shutdown()
        server.server_close()
    assert (ended.returncode, ended.stdout) == (0, "b'bytes'\n"), ended.stderr
