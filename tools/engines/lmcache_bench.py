"""LMCache over a shaped link: kvabr's plug-in against LMCache's own server with its fixed CacheGen level.

  tools/engine lmcache bench [--mbps 20,50,100] [--rtt 20] [--deadline 3] [--tokens 2048] [--quic qh3] [--json F]
    [--storages CacheGen,naive,kvabr,kvabr+AC] [--policies anytime,fixed:Int8,fixed:AC-5x] [--prefill-rate 20000]

The cache of a real text under SmolLM2 is stored through LMCache's engine in each storage, and retrieved over a link of
the same rate and round trip: kvabr over UDP (its own shaper), LMCache's server over TCP (a lossless proxy). Seconds are
from `retrieve` until the chunks are in the engine's cache, decoded on this machine's CPU; "link s" is the bare transfer
time. ``kvabr+AC`` has the model's codec profile. KL is that of the next 64 tokens against the exact cache, nats per
token. With ``--prefill-rate`` (tokens per second) kvabr leaves the last chunks to an engine; the seconds exclude their
computation. Rows are single runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

logging.disable(logging.INFO)

import torch  # noqa: E402
from lmcache.v1.cache_engine import LMCacheEngineBuilder  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.gpu_connector import GPUConnectorInterface  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402

import kvabr.data  # noqa: E402
from kvabr.engines.transformers.model_loader import load_model  # noqa: E402
from kvabr.publish.texts import measuring_texts  # noqa: E402
from kvabr.types.naming import LAYERS  # noqa: E402
from kvabr_lab.day.synth import synthesise  # noqa: E402
from kvabr_lab.live.origin import LiveOrigin  # noqa: E402
from kvabr_lab.live.packet_schedule import Conditions  # noqa: E402
from kvabr_lab.live.shaper import Shaper  # noqa: E402
from tests.engines.smollm2_folder import smollm2_folder  # noqa: E402

CHUNK, CONTINUATION = 256, 64
PREFIX = "remote_storage_plugin.kvabr."
PLAIN = ("FP16", "Int8", "Int4")
PROFILE_FILE = Path(kvabr.data.__file__).with_name(kvabr.data.SMOLLM2.file)
_PIECE = 16 << 10


class OnCpu(GPUConnectorInterface):
    """Copies chunks between LMCache and a cache, [K/V, layer, token, head x dim]."""

    def __init__(self, layers: int, width: int) -> None:
        """``width`` is heads times dim."""
        self._layers, self._width = layers, width

    def from_gpu(self, chunk, start, end, **kwargs):  # noqa: ANN001, ANN003, ANN201
        chunk.tensor.copy_(kwargs["cache"][:, :, start:end])

    def to_gpu(self, chunk, start, end, **kwargs):  # noqa: ANN001, ANN003, ANN201
        kwargs["cache"][:, :, start:end].copy_(chunk.tensor)

    def batched_from_gpu(self, chunks, starts, ends, **kwargs):  # noqa: ANN001, ANN003, ANN201
        for one in zip(chunks, starts, ends, strict=True):
            self.from_gpu(*one, **kwargs)

    def batched_to_gpu(self, chunks, starts, ends, **kwargs):  # noqa: ANN001, ANN003, ANN201
        for one in zip(chunks, starts, ends, strict=True):
            self.to_gpu(*one, **kwargs)

    def get_shape(self, tokens):  # noqa: ANN001, ANN201
        return torch.Size([2, self._layers, tokens, self._width])


def proxy(pipe, carried, target: int, rate: float, rtt_s: float) -> None:  # noqa: ANN001
    """Forward bytes from the server at ``rate`` bytes/s, and delay both directions by ``rtt_s``/2."""
    asyncio.run(_proxy(pipe, carried, target, rate, rtt_s))


async def _proxy(pipe, carried, target: int, rate: float, rtt_s: float) -> None:  # noqa: ANN001
    link_free_s = 0.0  # of all connections together

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, at: float | None) -> None:
        nonlocal link_free_s
        loop = asyncio.get_running_loop()
        queue = asyncio.Queue[tuple[float, bytes]](256)

        async def deliver() -> None:
            while True:
                due_s, data = await queue.get()
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                writer.write(data)
                await writer.drain()
                if not data:
                    writer.close()
                    return

        delivering = loop.create_task(deliver())
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                free_s = loop.time()
                if at is not None:
                    free_s = link_free_s = max(link_free_s, free_s) + len(data) / at
                    carried.value += len(data)
                await queue.put((free_s + rtt_s / 2, data))
                await asyncio.sleep(max(0.0, free_s - loop.time() - 0.005))
        await queue.put((loop.time(), b""))
        await delivering

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(carry(reader, up_writer, None), carry(up_reader, writer, rate), return_exceptions=True)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


@contextlib.contextmanager
def tcp_link(target: int, rate: float, rtt_s: float):  # noqa: ANN201
    """Yield the port of an emulated link to ``target``, and the counter of bytes from the server."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    carried = context.Value("q", 0)
    process = context.Process(target=proxy, args=(theirs, carried, target, rate, rtt_s), daemon=True)
    process.start()
    try:
        yield ours.recv(), carried
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def lmcache_server():  # noqa: ANN201
    """Yield the port of LMCache's own server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(  # noqa: S603  # our own interpreter
        [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


class Bench:
    """The model, its exact cache, and LMCache engines for it."""

    def __init__(self, folder: Path, tokens: int) -> None:
        """Compute the exact cache."""
        smollm2_folder(folder)
        self.model = str(folder)
        self.loaded = load_model("smollm2")
        ids = self.loaded.encode(measuring_texts()["manual"])[: tokens + CONTINUATION]
        self.ids, self.rest = ids[:tokens], ids[tokens:]
        self.spec = self.loaded.engine.spec
        start = time.perf_counter()
        self.exact = self.loaded.engine.prefill(self.ids).half()
        self.prefill_s = time.perf_counter() - start
        self.wanted = self.loaded.engine.score(self.exact.float(), self.rest)
        width = self.spec.kv_heads * self.spec.head_dim
        self.cache = self.exact.permute(1, 0, 3, 2, 4).reshape(2, self.spec.layers, tokens, width).contiguous()
        self.tokens = torch.tensor(self.ids)
        self.engines = 0

    @contextlib.contextmanager
    def engine(self, serde: str, extra: dict, url: str | None = None):  # noqa: ANN201
        """Yield an LMCache engine."""
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=0.5, remote_serde=serde, remote_url=url,
            blocking_timeout_secs=120, remote_storage_plugins=["kvabr"] if extra else None, extra_config=extra or None,
        )  # fmt: skip
        spec = self.spec
        metadata = LMCacheMetadata(
            self.model, 1, 1, 0, 0, torch.float16, (spec.layers, 2, CHUNK, spec.kv_heads, spec.head_dim)
        )
        name = f"bench-{self.engines}"
        self.engines += 1
        engine = LMCacheEngineBuilder.get_or_create(
            name, config, metadata, OnCpu(spec.layers, spec.kv_heads * spec.head_dim), lambda *_: None, lambda x, _: x
        )
        engine.post_init()
        try:
            yield engine
        finally:
            LMCacheEngineBuilder.destroy(name)

    def store(self, engine) -> float:  # noqa: ANN001
        """Store the cache; return CPU seconds of all threads."""
        spent = time.process_time()
        engine.store(tokens=self.tokens, cache=self.cache)
        backend = next(b for n, b in engine.storage_manager.storage_backends.items() if n.startswith("RemoteBackend"))
        while backend.put_tasks:
            time.sleep(0.05)
        return time.process_time() - spent

    def retrieve(self, engine) -> dict:  # noqa: ANN001
        """Retrieve the cache, and measure its quality."""
        into = torch.zeros_like(self.cache)
        hit = engine.lookup(self.tokens)  # dials and looks up once, as a serving engine has done
        start = time.perf_counter()
        mask = engine.retrieve(tokens=self.tokens[:hit], cache=into)
        seconds = time.perf_counter() - start
        spec, got = self.spec, int(mask.sum())
        kv = into.reshape(2, spec.layers, -1, spec.kv_heads, spec.head_dim).permute(1, 0, 3, 2, 4)
        kl = None
        if got == hit > 0:
            kv = kv[:, :, :, :got].float()
            if got < len(self.ids):
                kv = torch.cat((kv, self.loaded.engine.prefill(self.ids[got:], kv)), dim=3)
            said = self.loaded.engine.score(kv.float(), self.rest)
            kl = float((self.wanted.exp() * (self.wanted - said)).sum(-1).mean())
        return {"seconds": seconds, "tokens": got, "kl": kl, "exact": torch.equal(into, self.cache)}


def metrics_of(engine):  # noqa: ANN001, ANN201
    """Return the counters of an engine's kvabr plug-in."""
    backend = next(b for n, b in engine.storage_manager.storage_backends.items() if n.startswith("RemoteBackend"))
    return backend.connection.getWrappedConnector().metrics


def kvabr_options(**options: object) -> dict:
    """Return LMCache's ``extra_config`` with these options."""
    extra = {"module_path": "kvabr.engines.lmcache.connector", "class_name": "KvabrAdapter", "model": "bench/smollm2"}
    return {f"{PREFIX}{key}": value for key, value in (extra | options).items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbps", default="20,50,100")
    parser.add_argument("--rtt", type=float, default=20.0, help="milliseconds")
    parser.add_argument("--deadline", type=float, default=3.0, help="seconds")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--quic", default="qh3", choices=("aioquic", "qh3"))
    parser.add_argument("--storages", default="CacheGen,naive,kvabr,kvabr+AC")
    parser.add_argument(
        "--policies", default="anytime", help="policies of kvabr; those with missing tracks are left out"
    )
    parser.add_argument(
        "--prefill-rate", type=float, metavar="TOK/S", help="prefill rate of an engine that computes a tail"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as scratch, lmcache_server() as port:
        bench = Bench(Path(os.environ.get("KVABR_SMOLLM2") or Path(scratch) / "model"), args.tokens)
        print(f"{args.tokens} tokens, {bench.cache.nbytes / 1e6:.1f} MB at FP16, prefill {bench.prefill_s:.2f} s here")
        spent, wanted = {}, args.storages.split(",")
        rates = [float(rate) for rate in args.mbps.split(",")]
        # The server stores chunks by key alone: the last one stored replaces earlier ones.
        for name, serde in (("CacheGen", "cachegen"), ("naive", "naive")):
            if name not in wanted:
                continue
            with bench.engine(serde, {}, f"lm://127.0.0.1:{port}") as engine:
                spent[name] = bench.store(engine)
                bench.retrieve(engine)  # numba compiles CacheGen's kernels on first use
            rows += [over_tcp(bench, name, serde, port, rate, args) for rate in rates]
        for name, tracks in (("kvabr", PLAIN), ("kvabr+AC", (*PLAIN, "AC-5x", *LAYERS))):
            if name not in wanted:
                continue
            options = {"profile": str(PROFILE_FILE)} if name == "kvabr+AC" else {}
            assets = Path(scratch) / name
            assets.mkdir()
            with bench.engine("naive", kvabr_options(publish=str(assets), tracks=tracks, **options)) as engine:
                spent[name] = bench.store(engine)
            playable = [
                each for each in args.policies.split(",") if each.removeprefix("fixed:") in ("anytime", *tracks)
            ]
            with LiveOrigin(assets, args.quic) as origin:
                rows += [
                    over_udp(bench, origin, rate, args, name, options | {"policy": policy})
                    for rate in rates
                    for policy in playable
                ]
    for name, seconds in spent.items():
        print(f"{name}: {seconds:.2f} CPU seconds to store")
    head = ("Mbit/s", "storage", "seconds", "MB", "link s", "tokens", "KL mnats", "exact")
    print("{:>7} {:22} {:>8} {:>7} {:>7} {:>7} {:>9} {:>6}".format(*head))
    for row in sorted(rows, key=lambda row: (row["mbps"], row["storage"])):
        kl = "-" if row["kl"] is None else f"{row['kl'] * 1e3:.3f}"
        print(
            f"{row['mbps']:7g} {row['storage']:22} {row['seconds']:8.2f} {row['bytes'] / 1e6:7.1f}"
            f" {row['bytes'] * 8e-6 / row['mbps']:7.2f} {row['tokens']:7d} {kl:>9} {row['exact']!s:>6}"
        )
    if args.json is not None:
        document = {"schema": "kvabr.bench-lmcache/1", "rows": rows, "store_cpu_s": spent}
        args.json.write_text(json.dumps(document, indent=1))


def over_tcp(bench: Bench, name: str, serde: str, port: int, mbps: float, args: argparse.Namespace) -> dict:
    """Measure LMCache's own server over a link."""
    with (
        tcp_link(port, mbps * 1e6 / 8, args.rtt / 1e3) as (link, carried),
        bench.engine(serde, {}, f"lm://127.0.0.1:{link}") as engine,
    ):
        row = {"mbps": mbps, "storage": name, **bench.retrieve(engine), "bytes": carried.value}
    print(row, flush=True)
    return row


def over_udp(bench: Bench, origin: LiveOrigin, mbps: float, args: argparse.Namespace, name: str, options: dict) -> dict:
    """Measure kvabr's origin over a link."""
    conditions = Conditions(rtt_s=args.rtt / 1e3)
    if args.prefill_rate is not None:
        options = options | {"prefill_rate": args.prefill_rate}
    trace = synthesise("constant", mean_mbps=mbps, duration_s=3600.0, step_s=60.0)
    with Shaper(origin.address, conditions) as link:
        link.load(trace)
        link.begin(trace, 0.0, conditions)
        extra = kvabr_options(
            url=f"moqt://127.0.0.1:{link.address[1]}/", fingerprint=origin.fingerprint, quic=args.quic,
            deadline_s=args.deadline, lookup_s=5.0, patience=20.0, **options,
        )  # fmt: skip
        with bench.engine("naive", extra) as engine:
            row = {"mbps": mbps, "storage": f"{name} {options['policy']}", **bench.retrieve(engine)}
            row["bytes"] = int(metrics_of(engine).value("kvabr_client_downloaded_bytes_total"))
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
