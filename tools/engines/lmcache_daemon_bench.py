"""LMCache's daemon over a shaped link: kvabr's L2 adapter against LMCache's own remote store, Redis.

    tools/engine-lmcache bench-daemon [--mbps 50] [--rtt 20] [--tokens 2048] [--runs 5] [--json F]
        [--storages resp,resp+fp8,resp+kvabr,kvabr] [--plays anytime@3,anytime@1,fixed:Int8@3]

The cache of a real text under SmolLM2 is written to the daemon's storage manager, which stores it; another one
prefetches it over a link of the same rate and round trip: kvabr over UDP (its own shaper), Redis over TCP (a proxy that
passes bytes on at the rate, all connections together). Seconds are from the request of the prefetch until it is
complete, so lookup, transfer and decoding on this machine's CPU. The storages take turns in each run, and each row is
the median of its runs. KL is that of the next 64 tokens against the exact cache, nats per token. Needs redis-server.
``resp+fp8`` and ``resp+kvabr`` are Redis behind LMCache's serde ``fp8`` and kvabr's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import add_storage_manager_args, parse_args_to_config
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache_bench import CHUNK, PLAIN, PROFILE_FILE, Bench, tcp_link

from kvabr.types.naming import LAYERS
from kvabr_lab.day.synth import synthesise
from kvabr_lab.live.lane import Conditions
from kvabr_lab.live.origin import LiveOrigin
from kvabr_lab.live.shaper import Shaper

_ABSENT = bytes(32)
SERDES: dict[str, dict | None] = {
    "resp": None,
    "resp+fp8": {"type": "fp8"},
    "resp+kvabr": {"type": "kvabr", "profile": str(PROFILE_FILE)},
}


@contextlib.contextmanager
def redis() -> Iterator[int]:
    """A Redis server in memory, and its port."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603  # no input of others
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def manager(adapter: dict) -> Iterator[StorageManager]:
    """The daemon's storage manager with one L2 adapter."""
    parser = argparse.ArgumentParser()
    add_storage_manager_args(parser)
    given = ["--l1-size-gb", "0.3", "--eviction-policy", "noop", "--l2-adapter", json.dumps(adapter)]
    config = parse_args_to_config(parser.parse_args(given))
    config.l1_manager_configs[0].memory_config.shm_name = ""
    made = StorageManager(config)
    try:
        yield made
    finally:
        made.close()


def kvabr(**params: object) -> dict:
    """The adapter's specification."""
    return {
        "type": "plugin", "module_path": "kvabr.engines.lmcache.daemon", "class_name": "KvabrL2",
        "adapter_params": {"model": "bench/smollm2", "profile": str(PROFILE_FILE), **params},
    }  # fmt: skip


def resp(name: str, port: int) -> dict:
    """The specification of LMCache's Redis adapter with a serde."""
    plain = {"type": "resp", "host": "127.0.0.1", "port": port}
    if name != "resp+kvabr":
        return {**plain, "serde": SERDES[name]}
    coded = {"type": "plugin", "module_path": "kvabr.engines.lmcache.serde", "class_name": "CodedL2"}
    return {**coded, "adapter_params": plain, "serde": SERDES[name]}


def key_of(chunk_hash: bytes) -> ObjectKey:
    """The key of a chunk."""
    return ObjectKey(chunk_hash, "bench/smollm2", ObjectKey.ComputeKVRank(1, 0, 1, 0))


class Stored(L2AdapterListener):
    """Waits until objects have been stored."""

    def __init__(self, keys: list[ObjectKey]) -> None:
        """Take their keys."""
        self.missing, self.all = set(keys), threading.Event()

    def on_l2_keys_stored(self, keys, sizes):  # noqa: ANN001, ANN201, ARG002
        self.missing -= set(keys)
        if not self.missing:
            self.all.set()

    def on_l2_keys_accessed(self, keys):  # noqa: ANN001, ANN201
        pass

    def on_l2_keys_deleted(self, keys):  # noqa: ANN001, ANN201
        pass


class DaemonBench:
    """The exact cache as objects of the daemon."""

    def __init__(self, bench: Bench) -> None:
        """Cut it."""
        self.bench = bench
        self.keys: list[ObjectKey] = []
        self.chunks = bench.cache.split(CHUNK, 2)
        self.layout = MemoryLayoutDesc([self.chunks[0].shape], [torch.float16])

    def hash(self) -> None:
        """Hash the prompt as the daemon does, whose adapter is told where chunks begin."""
        self.keys = list(map(key_of, TokenHasher(CHUNK).compute_chunk_hashes(self.bench.ids)))

    def store(self, adapter: dict) -> None:
        """Store it, and wait until it is."""
        with manager(adapter) as daemon:
            self.hash()
            stored = Stored(self.keys)
            daemon.register_l2_listener(stored)
            objects = daemon.reserve_write(self.keys, self.layout)
            for key, chunk in zip(self.keys, self.chunks, strict=True):
                objects[key].tensor.copy_(chunk)
            daemon.finish_write(self.keys)
            stored.all.wait()

    def fetch(self, adapter: dict) -> dict:
        """Prefetch it, and look how good it is."""
        with manager(adapter) as daemon:
            self.hash()
            self._prefetch(daemon, [key_of(_ABSENT)])  # dials, as a daemon that serves has done
            start = time.perf_counter()
            hits = self._prefetch(daemon, self.keys)
            seconds = time.perf_counter() - start
            spec, kl, into = self.bench.spec, None, None
            if hits == len(self.keys):
                with daemon.read_prefetched_results(self.keys) as objects:
                    into = torch.cat([each.tensor.clone() for each in objects], dim=2)
                kv = into.reshape(2, spec.layers, -1, spec.kv_heads, spec.head_dim).permute(1, 0, 3, 2, 4)
                said = self.bench.loaded.engine.score(kv.float(), self.bench.rest)
                kl = float((self.bench.wanted.exp() * (self.bench.wanted - said)).sum(-1).mean())
            inner = daemon.l2_adapters()[0][1]
            metrics = getattr(getattr(getattr(inner, "_origin", None), "client", None), "metrics", None)
            row = {
                "seconds": seconds,
                "chunks": hits,
                "kl": kl,
                "exact": into is not None and torch.equal(into, self.bench.cache),
            }
            if metrics is not None:
                row["bytes"] = int(metrics.value("kvabr_client_downloaded_bytes_total"))
            return row

    def _prefetch(self, daemon: StorageManager, keys: list[ObjectKey]) -> int:
        handle = daemon.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, self.layout)]))
        daemon.wait_prefetch_status(handle, 600.0)
        result = daemon.query_prefetch_status(handle)
        return sum(row.popcount() for row in result.hit_cells)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbps", type=float, default=50.0)
    parser.add_argument("--rtt", type=float, default=20.0, help="milliseconds")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quic", default="qh3", choices=("aioquic", "qh3"))
    parser.add_argument("--storages", default="resp,resp+fp8,resp+kvabr,kvabr")
    parser.add_argument("--plays", default="anytime@3,anytime@1", help="policies of kvabr with deadlines, seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    wanted, rows = args.storages.split(","), []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        bench = Bench(Path(os.environ.get("KVABR_SMOLLM2") or Path(scratch) / "model"), args.tokens)
        print(f"{args.tokens} tokens, {bench.cache.nbytes / 1e6:.1f} MB at FP16, prefill {bench.prefill_s:.2f} s here")
        daemon = DaemonBench(bench)
        ports = {name: stack.enter_context(redis()) for name in SERDES if name in wanted}
        for name, port in ports.items():
            daemon.store(resp(name, port))
        assets = Path(scratch) / "assets"
        assets.mkdir()
        daemon.store(kvabr(publish=str(assets), tracks=(*PLAIN, *LAYERS)))
        origin = stack.enter_context(LiveOrigin(assets, args.quic))
        for run in range(args.runs):
            rows += [
                {"run": run, "storage": name, **over_tcp(daemon, name, port, args)} for name, port in ports.items()
            ]
            if "kvabr" in wanted:
                rows += [
                    {"run": run, "storage": f"kvabr {play}", **over_udp(daemon, origin, *play.split("@"), args)}
                    for play in args.plays.split(",")
                ]
    print(
        f"{'storage':22} {'median s':>8} {'least':>6} {'most':>6} {'MB':>6} {'chunks':>6} {'KL mnats':>9} {'exact':>6}"
    )
    for name in dict.fromkeys(row["storage"] for row in rows):
        own = [row for row in rows if row["storage"] == name]
        seconds = sorted(row["seconds"] for row in own)
        kl = [row["kl"] * 1e3 for row in own if row["kl"] is not None]
        print(
            f"{name:22} {statistics.median(seconds):8.2f} {seconds[0]:6.2f} {seconds[-1]:6.2f}"
            f" {statistics.median(row['bytes'] for row in own) / 1e6:6.1f} {min(row['chunks'] for row in own):6d}"
            f" {statistics.median(kl) if kl else float('nan'):9.3f} {all(row['exact'] for row in own)!s:>6}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"schema": "kvabr.bench-lmcache-daemon/1", "rows": rows}, indent=1))


def over_tcp(daemon: DaemonBench, name: str, port: int, args: argparse.Namespace) -> dict:
    """Redis behind a link."""
    with tcp_link(port, args.mbps * 1e6 / 8, args.rtt / 1e3) as (link, carried):
        row = daemon.fetch(resp(name, link))
        return {**row, "bytes": carried.value}


def over_udp(daemon: DaemonBench, origin: LiveOrigin, policy: str, deadline_s: str, args: argparse.Namespace) -> dict:
    """An origin of kvabr behind a link."""
    conditions = Conditions(rtt_s=args.rtt / 1e3)
    trace = synthesise("constant", mean_mbps=args.mbps, duration_s=3600.0, step_s=60.0)
    with Shaper(origin.address, conditions) as link:
        link.load(trace)
        link.begin(trace, 0.0, conditions)
        url = f"moqt://127.0.0.1:{link.address[1]}/"
        reach = {"url": url, "fingerprint": origin.fingerprint, "quic": args.quic, "lookup_s": 5.0}
        return daemon.fetch(kvabr(policy=policy, deadline_s=float(deadline_s), **reach))


if __name__ == "__main__":
    main()
