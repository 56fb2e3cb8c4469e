"""The files in docs/deploy: their commands parse, their metrics exist, and what can run here accepts them."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvabr.cli.main import parse
from kvabr.server.metrics import Metrics
from kvabr.telemetry import PlayerMetrics
from kvabr.telemetry.client_metrics import ClientMetrics

DEPLOY = Path(__file__).resolve().parent.parent / "docs" / "deploy"
SYSTEMD = shutil.which("systemd-analyze")
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
SERVED = {"kvabr_connections", "kvabr_plays_total", "kvabr_client_plays_total"}
"""One metric of each kind, which must be among those that were collected."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def kvabr_commands() -> Iterator[list[str]]:
    for service in documents("compose.yaml")[0]["services"].values():
        if service["image"] == "kvabr":
            yield shlex.split(service["command"])
    for document in documents("kubernetes/kvabr.yaml"):
        template = document.get("spec", {}).get("template") or document.get("spec", {}).get("jobTemplate")
        while template and "containers" not in template:
            template = template.get("spec") or template.get("template")
        for container in (template or {}).get("containers", ()):
            yield container["args"]
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        for command in re.findall(r"^ExecStart=\S+/kvabr (.*)$", unit.read_text(), re.MULTILINE):
            yield shlex.split(command)


def metric_names() -> set[str]:
    """Return the names of all samples that kvabr exposes."""
    names: set[str] = set()
    for metrics in (Metrics(), ClientMetrics(), PlayerMetrics()):
        for family in metrics.registry.collect():
            suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(family.type, ("",))
            names |= {family.name + suffix for suffix in suffixes}
    return names


def test_commands_parse():
    found = list(kvabr_commands())
    for arguments in found:
        parse(arguments)
    assert {arguments[0] for arguments in found} >= {"serve", "relay"}


def test_engines_are_configured_with_settings_that_exist():
    from kvabr.engines.settings import EngineSettings

    services = documents("compose.yaml")[0]["services"]
    for name in ("prefill", "decode"):
        command = services[name]["command"]
        config = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert config["kv_connector_module_path"] == "kvabr.engines.vllm"
        assert set(config["kv_connector_extra_config"]) <= set(EngineSettings.keys())


@pytest.mark.parametrize("name", ["prometheus/kvabr.rules.yml", "grafana/kvabr.json"])
def test_metrics_exist(name: str):
    text = (DEPLOY / name).read_text()
    known = metric_names()
    assert known >= SERVED
    used = set(re.findall(r"\bkvabr_[a-z_]+\b", text))
    assert used
    assert used <= known


def test_mounted_secrets_are_declared():
    compose = documents("compose.yaml")[0]
    for service in compose["services"].values():
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source.startswith((".", "$")) or source in compose["volumes"]
        for config in service.get("configs", ()):
            assert config["source"] in compose["configs"]


def test_the_cache_may_read_the_bucket_and_nobody_else_without_a_key():
    compose = documents("compose.yaml")[0]
    store = compose["services"]["store"]
    accounts = {each["name"]: each for each in json.loads(compose["configs"]["accounts"]["content"])["identities"]}
    assert f"-s3.config={store['configs'][0]['target']}" in shlex.split(store["command"])
    assert accounts["anonymous"] == {"name": "anonymous", "actions": ["Read:kvabr"]}
    assert accounts["kvabr"]["actions"] == ["Admin"]
    assert "ports" not in store


@pytest.mark.process
@pytest.mark.skipif(SYSTEMD is None, reason="there is no systemd-analyze: apt-get install systemd")
def test_systemd_accepts_the_units(tmp_path: Path):
    program = tmp_path / "kvabr"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for unit in sorted((DEPLOY / "systemd").glob("*.service")) + sorted((DEPLOY / "systemd").glob("*.timer")):
        text = unit.read_text().replace("/opt/kvabr/bin/kvabr", str(program)).replace("User=kvabr", "User=root")
        (tmp_path / unit.name).write_text(text)
    units = [str(unit) for unit in sorted(tmp_path.glob("kvabr-*"))]
    done = subprocess.run(  # noqa: S603
        [str(SYSTEMD), "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if "kvabr" in line]
    assert not complaints


@pytest.mark.process
@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx")
def test_nginx_accepts_the_cache(tmp_path: Path):
    text = (DEPLOY / "nginx.conf").read_text().replace("/var/cache/nginx", str(tmp_path / "cache"))
    config = tmp_path / "nginx.conf"
    config.write_text(f"pid {tmp_path}/pid; error_log stderr;\n" + text.replace("store:8333", "127.0.0.1:8333"))
    done = subprocess.run(  # noqa: S603
        [str(NGINX), "-t", "-p", str(tmp_path), "-c", str(config)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
