"""A real S3 server for tests: SeaweedFS, from its package, on ports of its own, with accounts of its own."""

import json
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

BUCKET = "kvabr-test"
ACCOUNTS = {
    "admin": ["Admin", "Read", "Write", "List", "Tagging"],
    "publisher": [f"Read:{BUCKET}", f"Write:{BUCKET}", f"List:{BUCKET}"],
    "reader": [f"Read:{BUCKET}"],
}
"""Accounts and what they may do; a reader may GET, and nothing else."""


class Seaweed:
    """Starts the server, and waits until it answers."""

    def __init__(self, folder: Path, *, public: bool = False) -> None:
        """``public``: everybody may GET from the bucket, without an account, as HTTP caches do."""
        self.keys = {name: (secrets.token_hex(8), secrets.token_hex(16)) for name in ACCOUNTS}
        self._folder = folder
        (folder / "data").mkdir()
        accounts = [
            {
                "name": name,
                "credentials": [{"accessKey": self.keys[name][0], "secretKey": self.keys[name][1]}],
                "actions": may,
            }
            for name, may in ACCOUNTS.items()
        ]
        if public:
            accounts.append({"name": "anonymous", "actions": [f"Read:{BUCKET}"]})
        (folder / "s3.json").write_text(json.dumps({"identities": accounts}))
        ports = _free_ports(5)
        self.endpoint = f"http://127.0.0.1:{ports[0]}"
        names = ("s3.port", "master.port", "volume.port", "filer.port", "admin.port")
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(  # noqa: S603 - ours
            [
                Path(sys.executable).with_name("weed"), "mini", f"-dir={folder}/data", "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1", f"-bucket={BUCKET}", f"-s3.config={folder}/s3.json", "-master.telemetry=false",
                "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-filer.maxMB=1",
                *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
            ],
            stdout=self._log, stderr=subprocess.STDOUT, cwd=folder,
        )  # fmt: skip
        self._wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait(self) -> None:
        """Wait until the bucket exists, for minutes on a loaded machine."""
        until = time.monotonic() + 300
        while time.monotonic() < until and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.endpoint}/{BUCKET}/none", timeout=30)  # noqa: S310 - ours
            except urllib.error.HTTPError as error:
                if error.code in (403, 404) and self._bucket_exists():
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self.stop()
        raise AssertionError(f"SeaweedFS does not start: {(self._folder / 'log').read_text()[-2000:]}")

    def _bucket_exists(self) -> bool:
        from obstore.store import S3Store

        key, secret = self.keys["admin"]
        store = S3Store(
            BUCKET, endpoint=self.endpoint, access_key_id=key, secret_access_key=secret, region="us-east-1",
            client_options={"allow_http": True},
        )  # fmt: skip
        try:
            store.put("started", b"", mode="overwrite")
        except Exception:  # noqa: BLE001 - not yet
            return False
        return True

    def url(self, prefix: str | None = None, *, bucket: str = BUCKET) -> str:
        """Return the URL of a store; without a prefix, of an empty one."""
        prefix = secrets.token_hex(6) if prefix is None else prefix
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}"

    def environment(self, account: str = "admin") -> dict[str, str]:
        """Return the variables that give a process the credentials of an account."""
        key, secret = self.keys[account]
        return {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "us-east-1"}

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _free_ports(count: int) -> list[int]:
    """Return ports that are free, and so are those 10,000 above them, which the server takes for itself."""
    found: list[int] = []
    while len(found) < count:
        port = 20_000 + secrets.randbelow(10_000)
        if port not in found and _is_free(port) and _is_free(port + 10_000):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
