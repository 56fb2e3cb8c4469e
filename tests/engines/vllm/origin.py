"""An origin in a process of its own: `kvabr serve`, at one port, so that it can die and restart."""

import atexit
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from kvabr.server.certificates import ServerTls, check, make

ROOT = Path(__file__).resolve().parents[3]


class ServedFolder:
    def __init__(self, root, folder, quic="qh3"):
        certificate, key = make()
        self._cert, self._key = folder / "cert.pem", folder / "key.pem"
        self._cert.write_bytes(certificate)
        self._key.write_bytes(key)
        self.fingerprint = check(ServerTls(self._cert, self._key)).fingerprint
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._root, self._quic, self._log = root, quic, folder / "serve.log"
        self._process = None
        atexit.register(self.close)  # nobody does it if an engine does not start
        self.start()

    @property
    def address(self):
        return ("127.0.0.1", self.port)

    def start(self):
        command = [sys.executable, "-m", "kvabr", "serve", str(self._root), "--bind", f"127.0.0.1:{self.port}"]
        command += ["--cert", str(self._cert), "--key", str(self._key), "--quic", self._quic, "--drain", "0"]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(  # noqa: S603  # our own command
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
        assert b"moqt://" in self._process.stdout.readline()

    def log(self):
        return self._log.read_text()

    def wait_for_assets(self, count=1):
        """Wait until this number of assets has been noticed."""
        end_s = time.monotonic() + 300
        while self.log().count("asset added") < count:
            assert time.monotonic() < end_s
            time.sleep(0.05)

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def close(self):
        if self._process is not None:
            self.kill()
