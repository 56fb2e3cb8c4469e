"""nginx as a cache in front of a store, configured as `docs/deploy/nginx.conf` says."""

import contextlib
import os
import re
import resource
import shutil
import socket
import subprocess
import time
from pathlib import Path

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIG = Path(__file__).resolve().parent.parent / "docs" / "deploy" / "nginx.conf"
START_S = 300.0


class Nginx:
    """Starts it in a folder, which is made, and waits until it listens. It needs `NGINX`."""

    def __init__(self, folder: Path, store: str, bucket: str = "", *, slice_size: str = "1m") -> None:
        """``store``: host and port. The paths below ``bucket`` are cached, those of players and of the store alike."""
        folder.mkdir()
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        (folder / "nginx.conf").write_text(documented(folder, store, bucket, slice_size, port))
        self._process = subprocess.Popen(  # noqa: S603 - ours
            [str(NGINX), "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"]
        )
        until = time.monotonic() + START_S
        while not (_listens(port) and self.pids):
            if self._process.poll() is not None or time.monotonic() > until:
                self.stop()
                raise AssertionError(f"nginx does not start: {self.complaints}")
            time.sleep(0.05)

    @property
    def pids(self) -> list[int]:
        """Ids of its workers; it has other children for a while."""
        own, found = self._process.pid, []
        for child in Path(f"/proc/{own}/task/{own}/children").read_text().split():
            with contextlib.suppress(OSError):
                if "worker" in Path(f"/proc/{child}/cmdline").read_text():
                    found.append(int(child))
        return found

    @property
    def complaints(self) -> str:
        return (self._folder / "error.log").read_text()

    def requests(self) -> int:
        return (self._folder / "answered.log").read_text().count("\n")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def documented(folder: Path, store: str, bucket: str, slice_size: str, port: int) -> str:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    changes = {
        r"worker_rlimit_nofile \d+;": f"worker_rlimit_nofile {min(files, 1 << 20) if files > 0 else 1 << 20};",
        r"access_log off;": f"log_format answered '$uri'; access_log {folder}/answered.log answered; {temporary}",
        r"/var/cache/nginx": f"{folder}/cache",
        r"server store:8333;": f"server {store};",
        r"listen 8080\b": f"listen 127.0.0.1:{port}",
        r"location /kvabr/": f"location /{bucket}{'/' if bucket else ''}",
        r"slice 1m;": f"slice {slice_size};",
    }
    text = CONFIG.read_text(encoding="utf-8")
    for pattern, here in changes.items():
        text, count = re.subn(pattern, here, text)
        assert count == 1, f"{CONFIG}: {pattern!r} is there {count} times"
    user = "user root; " if os.getuid() == 0 else ""
    return f"{user}daemon off; pid {folder}/pid;\n{text}"


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]
