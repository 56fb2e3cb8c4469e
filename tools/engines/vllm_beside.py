"""Time to first token and answers in real vLLM: computing, LMCache's remote store and kvabr over one shaped link.

  tools/bench-vllm-beside [--mbit 10 50 200 1000] [--rtt 20] [--tokens 4000] [--questions 6] [--systems ...]
                          [--json F]

One vLLM engine on this machine's processor serves SmolLM2-135M in bfloat16. A shared prompt of --tokens tokens is
published once; then --questions questions follow that prompt one after the other, and the engine has forgotten
everything else. The origin (`kvabr serve`, or LMCache's own server) is at the other end of an emulated link for whole
IP packets, so each system uses its own sockets and the kernel's TCP. The first question over each link is a warm-up.

computed          vLLM alone
batched           the same, all questions at once: how much vLLM's own answers differ
lmcache           LMCache's vLLM connector and its remote store `lm://`, chunks as they are in memory
lmcache+cachegen  the same with CacheGen, LMCache's compression
kvabr             the connector's defaults
kvabr:POLICY      with another policy, such as kvabr:fixed:FP16 for exact caches

Prints the median time to the first token, and the number of greedy answers (32 tokens) that equal those of computing.
LMCache has no connector for processors, so the copy between its buffers and vLLM's blocks is ours.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/lab"), str(ROOT / "tools/engines")]

from kvabr.replay.trace import BYTES_PER_MBIT, Trace  # noqa: E402  # after the path is known
from kvabr.server.certificates import check, development  # noqa: E402
from kvabr_lab.live.packet_schedule import Conditions  # noqa: E402
from kvabr_lab.live.tun import FAR, TunShaper  # noqa: E402

SYSTEMS = ("computed", "lmcache", "lmcache+cachegen", "kvabr", "kvabr:fixed:FP16")
ANSWER = 32
QUESTIONS = (
    "What does the with statement do?",
    "Which operators compare two objects?",
    "How is a class defined?",
    "What is the difference between a list and a tuple?",
    "When is the else clause of a loop executed?",
    "How are exceptions raised and handled?",
    "What is an attribute reference?",
    "How does slicing work?",
    "What does the import statement do?",
    "What is a generator?",
    "How do decorators work?",
    "What is the scope of a name?",
)
_CHUNK = 256
"""Tokens per chunk, LMCache's default."""
_PUBLISH_S = 300.0
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",  # of LMCache's keys
}
_MODEL = Path(os.environ.get("KVABR_VLLM") or ROOT / ".engines/vllm") / "smollm2"


def main() -> int:
    """Run each system in its own process, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[10.0, 50.0, 200.0, 1000.0])
    parser.add_argument("--rtt", type=float, default=20.0, metavar="MS")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--questions", type=int, default=6, help=f"number of questions, at most {len(QUESTIONS)}")
    parser.add_argument(
        "--systems", nargs="+", default=list(SYSTEMS), help=f"systems to measure (default: {' '.join(SYSTEMS)})"
    )
    parser.add_argument(
        "--deadline", type=float, metavar="S", help="deadline of kvabr's plays, seconds (default: the connector's)"
    )
    parser.add_argument("--json", type=Path, metavar="F")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # option of the processes
    args = parser.parse_args()
    if args.one is not None:
        args.json.write_text(json.dumps(_measured(args.one, args)))
        os._exit(0)  # threads of LMCache would keep the process alive
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for system in args.systems:
            print(f"{system} ...", file=sys.stderr, flush=True)
            result = Path(folder) / "rows.json"
            command = [sys.executable, __file__, "--one", system, "--json", str(result), "--rtt", f"{args.rtt:g}"]
            command += ["--tokens", str(args.tokens), "--questions", str(args.questions), "--mbit"]
            command += [f"{mbit:g}" for mbit in args.mbit]
            command += [] if args.deadline is None else ["--deadline", f"{args.deadline:g}"]
            subprocess.run(command, check=True)  # noqa: S603  # this very script
            rows += json.loads(result.read_text())
    _print(rows, args)
    if args.json is not None:
        args.json.write_text(json.dumps({"schema": "kvabr.bench-beside/1", "rows": rows}, indent=1) + "\n")
    return 0


def _print(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    truth = {row["question"]: row["answer"] for row in rows if row["system"] == "computed"}
    print(f"{args.tokens} tokens, round trip {args.rtt:g} ms: median seconds to the first token")
    print("(answers equal to computed ones, median loss reported by kvabr)")
    print(f"{'Mbit/s':18}" + "".join(f"{mbit:>26g}" for mbit in args.mbit))
    for system in args.systems:
        cells = []
        for mbit in args.mbit:
            own = [row for row in rows if row["system"] == system and row["mbit"] in (mbit, None)]
            same = sum(row["answer"] == truth.get(row["question"]) for row in own)
            median = statistics.median(row["ttft_s"] for row in own)
            losses = [row["loss"] for row in own if row["loss"] is not None]
            loss = f", {statistics.median(losses):.1g}" if losses else ""
            cells.append(f"{f'{median:.2f} ({same} of {len(own)}{loss})':>26}")
        print(f"{system:18}" + "".join(cells))


def _measured(system: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        conditions = Conditions(rtt_s=args.rtt / 1e3)
        link = stack.enter_context(TunShaper(conditions))
        transfer, published = None, None
        if system.startswith("lmcache"):
            transfer, published = _lmcache(stack, folder, "cachegen" if "cachegen" in system else "naive")
        elif system.startswith("kvabr"):
            transfer, published = _kvabr(stack, folder, system.partition(":")[2])
        engine = Engine(transfer, args.tokens)
        text = engine.tokens("\n".join(topics.values())[: 40 * args.tokens])
        prompt = text[: args.tokens]
        questions = [engine.tokens(f"\n\nQuestion: {one}\nAnswer:") for one in QUESTIONS[: args.questions]]
        if published is not None:
            engine.ask(prompt + questions[0])
            published(engine)
        rows: list[dict[str, Any]] = []
        if system == "batched":
            answers = engine.batch([prompt + question for question in questions])
            return [{"system": system, "mbit": None, "question": at, **one} for at, one in enumerate(answers)]
        params = {"publish": False} if args.deadline is None else {"publish": False, "deadline_s": args.deadline}
        for mbit in args.mbit if transfer is not None else [None]:
            if mbit is not None:
                link.begin(Trace("flat", "flat", (0.0,), (mbit * BYTES_PER_MBIT,), 1e5), 0.0, conditions)
            for number in (-1, *range(len(questions))):
                engine.forget()
                one = engine.ask(prompt + questions[max(number, 0)], **params)
                print(f"  {system}, {mbit or 'no'} Mbit/s: {one['ttft_s']:.2f} s", file=sys.stderr, flush=True)
                rows += [{"system": system, "mbit": mbit, "question": number, **one}] if number >= 0 else []
        return rows


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, transfer: dict[str, Any] | None, tokens: int) -> None:
        """Start vLLM; ``transfer`` is its ``--kv-transfer-config``."""
        os.environ |= _ENVIRONMENT
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.llm = LLM(
            str(_MODEL),
            dtype="bfloat16",
            max_model_len=tokens + 256,
            max_num_seqs=4,
            enforce_eager=True,
            disable_log_stats=False,
            kv_transfer_config=None if transfer is None else KVTransferConfig(kv_role="kv_both", **transfer),
        )

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self.llm.get_tokenizer().encode(text))

    def ask(self, prompt: list[int], **params: Any) -> dict[str, Any]:
        """Return the seconds to the first token of an answer, the answer's tokens, and the loss reported by kvabr."""
        (one,) = self.batch([prompt], **params)
        return one

    def batch(self, prompts: list[list[int]], **params: Any) -> list[dict[str, Any]]:
        """Send several prompts at the same time."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
        sampling.extra_args = {"kv_transfer_params": params} if params else None
        out = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [
            {
                "ttft_s": each.metrics.first_token_latency,
                "answer": list(each.outputs[0].token_ids),
                "loss": ((each.kv_transfer_params or {}).get("kvabr") or {}).get("loss"),
            }
            for each in out
        ]

    def forget(self) -> None:
        """Empty vLLM's prefix cache, after its pending work is done."""
        core = self.llm.llm_engine.engine_core.engine_core
        while core.scheduler.has_finished_requests() or core.scheduler.has_requests():
            self.llm.llm_engine.step()
        if not self.llm.reset_prefix_cache():
            raise SystemExit("vLLM could not reset its prefix cache")


def _kvabr(stack: ExitStack, folder: Path, policy: str) -> tuple[dict[str, Any], Any]:
    assets = folder / "assets"
    assets.mkdir()
    port, tls = _free_port(), development()
    command = [sys.executable, "-m", "kvabr", "serve", str(assets), "--bind", f"0.0.0.0:{port}"]
    command += ["--cert", str(tls.certfile), "--key", str(tls.keyfile)]
    log = stack.enter_context((folder / "serve.log").open("w+"))
    _run(stack, command, port, stderr=log, cwd=ROOT)
    settings = {
        "url": f"moqt://{FAR}:{port}/",
        "fingerprint": check(tls).fingerprint,
        "publish": str(assets),
        "store_mib": 0,  # every question fetches
        **({"policy": policy} if policy else {}),
        **json.loads((_MODEL / "kvabr.json").read_text()),
    }

    def published(engine: Engine) -> None:
        end_s = time.monotonic() + _PUBLISH_S
        while "asset added" not in Path(log.name).read_text():
            if time.monotonic() > end_s:
                raise SystemExit(f"no cache was published: {Path(log.name).read_text()}")
            engine.forget()
            time.sleep(0.1)

    transfer = {"kv_connector": "KvabrConnector", "kv_connector_module_path": "kvabr.engines.vllm"}
    return transfer | {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": settings}, published


def _lmcache(stack: ExitStack, folder: Path, serde: str) -> tuple[dict[str, Any], Any]:
    port = _free_port()
    _run(stack, [sys.executable, "-m", "lmcache.v1.server", "0.0.0.0", str(port), "cpu"], port)  # noqa: S104
    config = folder / "lmcache.yaml"
    lines = [f"remote_url: lm://{FAR}:{port}", f"remote_serde: {serde}", f"chunk_size: {_CHUNK}", "local_cpu: false"]
    lines += ["max_local_cpu_size: 1", f"blocking_timeout_secs: {_PUBLISH_S:.0f}"]  # the default is 10 s
    config.write_text("\n".join(lines) + "\n")
    os.environ["LMCACHE_CONFIG_FILE"] = str(config)

    def published(engine: Engine) -> None:
        from lmcache.integration.vllm.utils import ENGINE_NAME
        from lmcache.v1.cache_engine import LMCacheEngineBuilder

        backends = LMCacheEngineBuilder.get(ENGINE_NAME).storage_manager.storage_backends
        remote = next(backend for name, backend in backends.items() if name.startswith("RemoteBackend"))
        engine.forget()
        while remote.put_tasks:
            time.sleep(0.1)

    return {"kv_connector": "LMCacheOnProcessor", "kv_connector_module_path": "vllm_beside_lmcache"}, published


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(stack: ExitStack, command: list[str], port: int, **how: Any) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, **{"stderr": subprocess.DEVNULL} | how)  # noqa: S603
    stack.callback(process.wait)
    stack.callback(process.terminate)
    end_s = time.monotonic() + _PUBLISH_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"{' '.join(command)} does not start") from None
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    raise SystemExit(main())
