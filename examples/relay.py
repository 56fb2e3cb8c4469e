"""Start an origin and a relay, and let two players fetch one cache: the origin sends it once.

python examples/relay.py ASSET
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import kvabr
from kvabr.store.locations import open_catalog


@contextmanager
def server(*words: str) -> Iterator[tuple[str, str]]:
    """Run a kvabr server; yield its URL and its certificate's fingerprint."""
    command = [sys.executable, "-m", "kvabr", *words, "--bind", "127.0.0.1:0", "--dev"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            seen = ""
            for line in process.stdout or ():
                seen += line
                fingerprint = re.search(r"fingerprint ([0-9a-f]{64})", seen)
                url = re.search(r"moqt://[\w.:]+/", seen)
                if fingerprint and url:
                    yield url[0], fingerprint[1]
                    return
            raise SystemExit(f"the server ended:\n{seen}")
        finally:
            process.terminate()


def main(asset: Path) -> None:
    """Play twice through the relay."""
    namespace = open_catalog(str(asset))[0].namespace
    with tempfile.TemporaryDirectory() as disk, server("serve", str(asset)) as (origin, trusted):
        upstream = ("--upstream", origin, "--upstream-fingerprint", trusted)
        with server("relay", *upstream, "--disk", disk) as (relay, fingerprint):
            for name in ("first", "second"):
                with kvabr.Client(relay, kvabr.PeerOptions(fingerprint=fingerprint)) as client:
                    played = client.play_asset(namespace, deadline=5.0)
                print(f"{name} player: {played.tokens} tokens after {played.ttft_s:.2f} s on {played.coverage[0]}")
            kept = [path for path in Path(disk).rglob("*") if path.is_file()]
            print(f"the relay keeps {len(kept)} files, which it fetched once")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
