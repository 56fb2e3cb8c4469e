"""Plays that tell of themselves: by the library and by `kvabr fetch`."""

from __future__ import annotations

import json

from kvabr.cli.main import main
from tests.client.served import Served


def test_fetch_writes_what_was_heard_however_the_play_ends(root, short, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    events, counts = tmp_path / "plays.jsonl", tmp_path / "kvabr.prom"
    served = Served(root / "short", tmp_path)
    words = ["--ca", str(served.pem), "--quic", "aioquic", "--deadline", "300", "--policy", "fixed:Int8"]
    words += ["--telemetry", str(events), "--metrics-file", str(counts)]
    name = f"{short.namespace.model}/{short.namespace.prompt}"
    try:
        assert main(["fetch", f"{served.url}#kvcache:{name}", *words]) == 0
        heard = [json.loads(line) for line in events.read_text().splitlines()]
        requests = [record for record in heard if record["event"] == "request"]
        assert len(requests) == short.groups
        assert {record["cmcd"]["cid"] for record in requests} == {short.namespace.prompt}
        assert (heard[0]["event"], heard[-1]["event"], heard[-1]["error"]) == ("called", "ended", None)
        assert 'kvabr_plays_total{result="met"} 1.0\n' in counts.read_text()
        assert main(["fetch", f"{served.url}#kvcache:m/{'0' * 64}", *words]) == 1
    finally:
        served.close()
    more = [json.loads(line) for line in events.read_text().splitlines()][len(heard) :]
    assert [record["event"] for record in more] == ["called", "ended"]
    assert more[-1]["error"] == "NotFoundError"
    assert more[0]["cmcd"]["sid"] != heard[0]["cmcd"]["sid"]
    assert 'kvabr_plays_total{result="failed"} 1.0\n' in counts.read_text()
    capsys.readouterr()
    assert main(["fetch", served.url, "--telemetry", str(tmp_path / "no" / "x.jsonl"), "--name", name]) == 2
    assert "there is no folder" in capsys.readouterr().err
