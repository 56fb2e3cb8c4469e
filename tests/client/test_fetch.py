"""`kvabr fetch` and `kvabr inspect URL` against a real origin: what they write, what they say, what they refuse."""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from kvabr.cli.main import main
from kvabr.cli.overlay import Overlay
from kvabr.client import memory
from kvabr.client.async_client import AsyncClient
from kvabr.client.result import IncompleteError
from kvabr.client.snapshot import Snapshot, TransferProgress
from kvabr.data import default_catalog
from kvabr.player.session_types import PlayRecord
from kvabr.store.locations import open_asset
from kvabr.transfer.interface import ConnectionStats
from kvabr.types.catalog import RECOMPUTED
from tests import tinymodels
from tests.client.served import Served
from tests.client.test_play import close
from tests.toymodel import SPEC, prompt

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("alone")]

TOKENS = prompt(70).tokens


@pytest.fixture(scope="module")
def served(root, tmp_path_factory):
    with Served(root / "short", tmp_path_factory.mktemp("served")) as made:
        yield made


def kvabr(*words):
    return main([str(word) for word in words])


def name(short):
    return f"{short.namespace.model}/{short.namespace.prompt}"


def network(served):
    return ("--ca", served.pem, "--quic", "aioquic", "--timeout", 300)


def test_fetch_writes_the_cache_and_says_how_it_went(served, short, tmp_path, capsys):
    out, result, log, tokens = (tmp_path / name for name in ("c.safetensors", "r.json", "l.jsonl", "p.json"))
    tokens.write_text(prompt(70).dumps())  # as it goes with an asset
    status = kvabr(
        "fetch", f"{served.url}#kvcache:{name(short)}", *network(served), "--deadline", 300, "--policy", "fixed:Int8",
        "--prompt", tokens, "--out", out, "--json", result, "--log", log,
    )  # fmt: skip
    assert status == 0
    said = capsys.readouterr()
    assert "70 tokens in place" in said.out
    assert "in time" in said.out
    assert "5 on Int8" in said.out
    with safe_open(out, "pt") as file:
        assert list(file.keys()) == ["kv"]
        kv = file.get_tensor("kv")
        facts = json.loads(file.metadata()["kvabr"])
    assert close(kv, error=1e-3)
    assert facts["format"] == "kvabr.cache/1"
    assert facts["spec"] == SPEC.to_json()
    assert facts["tokens"] == 70
    assert facts["tracks"] == ["Int8"] * 5
    assert facts["namespace"] == {"model": short.namespace.model, "prompt": short.namespace.prompt}
    line = json.loads(result.read_text())
    assert (line["schema"], line["command"]) == ("kvabr.result/1", "fetch")
    assert line["catalog_sha256"] == facts["catalog_sha256"]
    assert line["met"]
    assert [group["track"] for group in line["groups"]] == ["Int8"] * 5
    events = [json.loads(text)["event"] for text in log.read_text().splitlines()]
    assert (events[0], events[-1]) == ("start", "deliver")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "cache", "l.jsonl", "p.json", "r.json"]
    assert {path.stat().st_mode & 0o777 for path in (out, log)} == {0o600}  # as secret as the prompt
    folders = [path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and path.name == "kvabr"]
    assert {path.stat().st_mode & 0o777 for path in folders} <= {0o700}


def test_inspect_shows_what_an_origin_has(served, short, capsys):
    assert kvabr("inspect", f"{served.url}#kvcache:{name(short)}", *network(served)) == 0
    said = capsys.readouterr().out
    assert "70 tokens in 5 groups" in said
    assert f"#kvcache:{name(short)}" in said.replace("\n", "")
    assert kvabr("inspect", served.url, *network(served)) == 2
    assert "#kvcache:" in capsys.readouterr().err
    assert kvabr("inspect", f"{served.url}#kvcache:m/{'0' * 64}", *network(served)) == 1
    assert kvabr("inspect", f"{served.url}#kvcache:{name(short)}", "--check", *network(served)) == 2


def damage(folder, group, track):
    place = open_asset(folder).place(group, track)
    data = bytearray((folder / place.name).read_bytes())
    data[place.last - 1] ^= 1
    (folder / place.name).write_bytes(data)


def test_a_cache_with_a_group_that_cannot_be_had_is_written_up_to_there(root, short, tmp_path, capsys):
    shutil.copytree(root / "short", tmp_path / "origin")
    for track in ("FP16", "Int8", "Int4"):
        damage(tmp_path / "origin", 3, track)
    out, result = tmp_path / "c.safetensors", tmp_path / "r.json"
    with Served(tmp_path / "origin", tmp_path) as damaged:
        words = ("fetch", damaged.url, *network(damaged), "--name", name(short), "--deadline", 300)
        assert kvabr(*words, "--policy", "fixed:Int4", "--out", out, "--json", result) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "group 3 failed on every track" in said
    assert "missing groups: " in said
    assert "allow more time" not in said
    assert f"{out} has the first 48 tokens" in said
    with safe_open(out, "pt") as file:
        assert close(file.get_tensor("kv"), TOKENS[:48])
        assert json.loads(file.metadata()["kvabr"])["tokens"] == 48
    line = json.loads(result.read_text())
    assert line["missing"][0] == 3
    assert line["tokens"] == 48
    assert not line["met"]
    assert [group["track"] for group in line["groups"]] == ["Int4"] * 3


def test_the_advice_is_that_of_the_reason(served, short, capsys, monkeypatch):
    words = ("fetch", served.url, *network(served), "--name", name(short), "--policy", "fixed:Int4")
    assert kvabr(*words, "--deadline", 300, "--max-loss", 0) == 1
    said = capsys.readouterr().err
    assert "more than max_loss" in said
    assert "missing groups" not in said
    assert "allow more time" not in said

    async def late(*_, **__):
        raise IncompleteError("5 groups are missing", "", (0,), PlayRecord([], gave_up_late=True), None)

    monkeypatch.setattr(AsyncClient, "play_asset", late)
    assert kvabr(*words, "--deadline", 1e-9) == 1
    assert "5 groups are missing; allow more time: --deadline" in " ".join(capsys.readouterr().err.split())


def test_the_help_names_every_exit_status(capsys):
    with pytest.raises(SystemExit):
        kvabr("fetch", "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert "3 if a complete cache was played, but its groups could not be stored in --disk" in said


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 2, "name the cache"),
        (("--name", "NAME", "--wait-for-producer", "1"), 2, "instead of a name"),
        (("--prompt", "TOKENS", "--wait-for-producer", "1", "--no-live"), 2, "no --no-live"),
        (("--prompt", "TOKENS", "--wait-for-producer", "2"), 2, "--deadline above"),
        (("--prompt", "TOKENS", "--wait-for-producer", "-1"), 2, "must be at least 0"),
        (("--prompt", "NONE", "--wait-for-producer", "0.1"), 1, "and no producer has started to prefill it"),
        (("--name", "m/" + "0" * 64), 1, "no such asset m/" + "0" * 64),
        (("--name", "NAME", "--recompute", "smollm2"), 2, "needs the prompt"),
        (("--text", "TOKENS"), 2, "needs --model"),
        (("--name", "NAME", "--prompt", "BAD"), 2, "list of token ids"),
        (("--name", "NAME", "--prompt", "OTHER"), 2, "not those of"),
    ],
)
def test_what_is_refused_says_why(served, short, tmp_path, capsys, words, status, said):
    files = {"TOKENS": list(TOKENS), "BAD": {"tokens": ["a"]}, "OTHER": list(reversed(TOKENS)), "NONE": [1, 2, 3]}
    for key, value in files.items():
        (tmp_path / key).write_text(json.dumps(value))
    filled = [name(short) if w == "NAME" else str(tmp_path / w) if w in files else w for w in words]
    assert kvabr("fetch", served.url, *network(served), *filled) == status
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


RESTLESS = """
from kvabr.abr import Decision, Policy


class Restless(Policy):
    def decide(self, view):
        group = view.first_missing()
        if group is not None:
            return Decision.fetch(group, "Int4", "first of all")
        if not view.settled:
            return Decision.wait("for the others")
        group = min(view.settled)
        return Decision.upgrade(group, "Int8" if view.track_of[group] == "Int4" else "Int4", "to and fro until the end")
"""


@pytest.mark.process
def test_ctrl_c_leaves_no_file(served, short, tmp_path):
    policy, out, log = tmp_path / "restless.py", tmp_path / "c.safetensors", tmp_path / "l.jsonl"
    policy.write_text(RESTLESS)
    words = ["fetch", f"{served.url}#kvcache:{name(short)}", *network(served)]
    words += ["--deadline", 3600, "--policy", f"{policy}:Restless", "--out", out, "--log", log]
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "kvabr", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for line in process.stderr:
        if "5 of 5 groups in place" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    # The log of an interrupted play is there, and nothing else.
    assert len(log.read_text().splitlines()) > 10
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == ["l.jsonl", "restless.py"]


def test_a_text_and_a_model_find_a_cache_of_another_group_size(tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed: tools/setup-venv")
    text, result = tmp_path / "text", tmp_path / "result.json"
    text.write_text("the quick brown fox jumps over the lazy dog " * 8)
    model = tinymodels.save(tmp_path / "tiny-llama")
    asset = tmp_path / "origin" / "asset"
    prompt_of = ("--text", text, "--model", model)
    assert kvabr(
        "encode", *prompt_of, "--tokens", 200, "--continuation", 16, "--group-tokens", 64,
        "--tracks", "FP16", "Int8", "--out", asset,
    ) == 0  # fmt: skip
    with Served(tmp_path / "origin", tmp_path) as origin:
        how = (origin.url, *network(origin), "--deadline", 60, "--json", result)
        for more in ((), ("--recompute", model, "--gpu-price", "inf")):
            assert kvabr("fetch", *how, *prompt_of, *more) == 0
            said, line = capsys.readouterr().out, json.loads(result.read_text())
            assert "200 of 352 tokens in place" in said
            assert bool(line["division"]) == bool(more)
            assert [group["source"] for group in line["groups"]] == ["fetched"] * 4
        capsys.readouterr()
        # Only what computes needs the weights, and it is loaded only once the origin was reached.
        weights = next(model.glob("*.safetensors"))
        weights.write_bytes(b"damaged" + weights.read_bytes())
        assert kvabr("fetch", *how, *prompt_of) == 1
        assert "no part of this prompt is cached" in capsys.readouterr().err
        assert kvabr("fetch", *how, *prompt_of, "--recompute", model) == 1
        assert "cannot load this model" in capsys.readouterr().err
        assert kvabr("fetch", origin.url, *prompt_of, "--recompute", model) == 1
        assert "--fingerprint" in capsys.readouterr().err


@pytest.mark.model
def test_an_engine_computes_everything_if_no_origin_answers(tmp_path, capsys):
    text, result, out = tmp_path / "text", tmp_path / "result.json", tmp_path / "cache.safetensors"
    text.write_text("the quick brown fox jumps over the lazy dog " * 8)
    how = ("moqt://127.0.0.1:9/", "--timeout", 0.3, "--deadline", 300, "--text", text)
    model = tinymodels.save(tmp_path / "tiny-llama")
    assert kvabr("fetch", *how, "--recompute", model, "--json", result, "--out", out) == 0
    said, line = capsys.readouterr(), json.loads(result.read_text())
    assert "the engine computes the whole cache" in said.err
    assert (line["tokens"], line["tokens_recomputed"], line["backend"], line["bytes_fetched"]) == (352, 352, None, 0)
    assert out.stat().st_size
    for named in (("--name", "m/" + "0" * 64, "--recompute", model), ("--model", model)):
        assert kvabr("fetch", *how, *named) == 1
        assert "computes the whole" not in capsys.readouterr().err


@pytest.mark.model
def test_what_was_encoded_without_measuring_is_played_and_says_that_its_losses_are_estimated(tmp_path, capsys):
    text, made, result = tmp_path / "text", tmp_path / "made.json", tmp_path / "result.json"
    text.write_text("the quick brown fox jumps over the lazy dog " * 8)
    asset = tmp_path / "origin" / "asset"
    prompt_of = ("--text", text, "--model", tinymodels.save(tmp_path / "tiny-llama"))
    encode = ("encode", *prompt_of, "--tokens", 200, "--continuation", 16, "--group-tokens", 64, "--quick")
    assert kvabr(*encode, "--out", asset, "--json", made) == 0
    assert "estimated" in capsys.readouterr().out
    catalog, prior = open_asset(asset).catalog, default_catalog()
    assert catalog.estimated
    assert json.loads(made.read_text())["estimated"] is True
    assert [track.name for track in catalog.tracks] == ["FP16", "Int8", "Int4"]
    for track in catalog.tracks:
        assert track.measured is None
        assert track.total_loss == pytest.approx(prior.track(track.name).total_loss, rel=1e-3)
        assert track.tails == prior.track(track.name).tails
    assert catalog.mixes == catalog.asked == ()
    assert catalog.prefill is None  # the prior is of another model
    open_asset(asset).check_parts()
    with Served(tmp_path / "origin", tmp_path) as origin:
        how = (origin.url, *network(origin), *prompt_of, "--deadline", 300, "--policy", "fixed:Int8")
        assert kvabr("fetch", *how, "--json", result) == 0
    assert [group["track"] for group in json.loads(result.read_text())["groups"]] == ["Int8"] * 4


# -------------------------------------------------------------------- overlay


def shot(now=0.5, **changes):
    fields = {
        "now": now,
        "deadline_s": 2.0,
        "offers": ("Int4", "Int8", "FP16"),
        "tracks": ("FP16", None, "Int4", None, RECOMPUTED, None),
        "transfers": {1: TransferProgress("Int4", 0.5), 2: TransferProgress("Int8", 0.1)},
        "rate": 5e6,
        "lower_bound": 4e6,
        "slack_s": 0.75,
        "bytes_fetched": int(1e6 * now),
        "bytes_wasted": 2000,
        "requests": 2,
        "undecoded": 0,
        "decode_backlog_s": 0.012,
        "computing": True,
        "network": ConnectionStats(rtt_s=0.0213),
    }
    return Snapshot(**(fields | changes))


def shown(*shots, width=90, terminal=True, trouble=None):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=width, color_system=None)
    with Overlay("moqt://h/ by memory", console, lambda: trouble) as overlay:
        for each in shots:
            overlay.show(each)
    return screen.getvalue()


LOST = "connection lost, dialling again (3rd try): no answer"
SCREENS = [
    (
        [shot(step / 10) for step in range(1, 6)],
        ["█▄▲·█·", "FP16 1", "missing 3", "40.00 Mbit/s, at least 32.00 Mbit/s", "8.00 Mbit/s", "+0.75 s",
         "deadline in 1.50 s", "the engine computes", "500 kB (2 kB wasted)", "RTT 21.3 ms", "to decode 12 ms"],
    ),
    (
        [shot(edge=4, ends_s=1.25, tracks=("FP16", None, "Int4", None, None, None))],
        ["█▄▲·--", "missing 2", "not prefilled yet 2", "4 of 6 groups published", "expected in 0.75 s"],
    ),
    ([shot(undecoded=6)], [LOST, "6 to be decoded"]),
]  # fmt: skip


@pytest.mark.parametrize(("shots", "parts"), SCREENS)
def test_what_the_overlay_shows(shots, parts):
    text = shown(*shots, trouble=LOST if LOST in parts else None)
    assert [part for part in parts if part not in text] == []


def test_lines_instead_where_there_is_no_terminal():
    screen = io.StringIO()
    with Overlay("plain", Console(file=screen)) as overlay:
        for step in range(20):
            overlay.show(shot(step / 10))
        overlay.show(shot(9.5, rate=0.0, slack_s=None))
    lines = screen.getvalue().splitlines()
    assert len(lines) == 2
    assert "3 of 6 groups in place" in lines[0]
    assert "slack not known yet" in lines[-1]
    assert "rate not known yet" not in lines[-1], "it was known before"
    assert "rate not known yet, slack" in Overlay("new", Console(file=screen)).line(shot(rate=0.0))
    assert "\x1b" not in screen.getvalue()


def test_save_is_whole_or_not_at_all(tmp_path, monkeypatch):
    from kvabr.client.result import Played, save
    from kvabr.player.session_types import PlayRecord
    from kvabr.types.errors import AssetError

    kv = torch.zeros(SPEC.shape(3))
    played = Played((kv,), 3, ("recomputed",), 1.0, 0.1, True, 0.0, PlayRecord([]), SPEC)
    save(played, tmp_path / "good.safetensors")
    with safe_open(tmp_path / "good.safetensors", "pt") as file:
        assert json.loads(file.metadata()["kvabr"])["namespace"] is None
    with pytest.raises(AssetError, match="cannot be written"):
        save(played, tmp_path / "no" / "such" / "folder.safetensors")

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(AssetError, match="No space left"):
        save(played, tmp_path / "good.safetensors")
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["good.safetensors"]


def test_a_device_or_a_pipe_is_left_alone(tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out in (pipe, "/dev/null"):
        assert kvabr("fetch", "moqt://localhost:1/", "--name", f"m/{'0' * 64}", "--out", out) == 2
        assert "not a regular file" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_damage_that_is_met_is_named(root, tmp_path, capsys, caplog):
    shutil.copytree(root / "short", tmp_path / "assets" / "short")
    damage(tmp_path / "assets" / "short", 1, "Int8")
    prompts, result = tmp_path / "prompt.json", tmp_path / "r.json"
    prompts.write_text(json.dumps(list(TOKENS)))
    with Served(tmp_path / "assets", tmp_path) as served:
        options = ("--policy", "fixed:Int8", "--prompt", prompts, "--deadline", 300, "--json", result)
        assert kvabr("fetch", served.url, *network(served), *options) == 0
    assert "damaged: group 1 on Int8" in capsys.readouterr().out
    found = json.loads(result.read_text())["damaged"]
    assert {(one["group"], one["track"]) for one in found} == {(1, "Int8")}
    assert all(one["what"] for one in found)
    assert "on Int8 is damaged (" in caplog.text


def test_a_disk_that_takes_nothing_is_told_in_words_and_by_the_exit_status(served, tmp_path):
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    words = ("fetch", served.url, *network(served), "--prompt", tmp_path / "prompt.json", "--deadline", 300)

    def full():  # for files of more than 512 bytes; what is printed goes to pipes
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))

    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "kvabr", *map(str, words), "--disk", tmp_path / "full", "--json", "/dev/stdout"],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=full,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "groups not stored on disk: " in done.stderr
    assert "File too large" in done.stderr


async def test_a_profile_that_cannot_be_kept_is_told_and_counted(origin, long, tmp_path):
    memory._profiles.clear()
    (tmp_path / memory.PROFILES).write_text("no folder")
    async with origin(folder="long", rate=1e9) as link, AsyncClient(link, cache=tmp_path) as client:
        with pytest.warns(RuntimeWarning, match="profile not stored on disk: "):
            await client.fetch_profile(long)
        assert client.metrics.value("kvabr_client_failed_writes_total", what="profile") == 1


def test_the_end_may_be_left_to_the_call_that_computes_a_question(served, short, tmp_path, capsys):
    out, told = tmp_path / "cache.safetensors", tmp_path / "told.json"
    command = ["fetch", f"{served.url}#kvcache:{name(short)}", *map(str, network(served)), "--deadline", "60"]
    command += ["--json", str(told)]
    assert main([*command, "--question", "20", "--tail", "40", "-o", str(out)]) == 0
    said, result = capsys.readouterr().out, json.loads(told.read_text())
    assert result["tail"] > 0
    assert f"the last {result['tail']} tokens of the cache are left for the engine to compute with the question" in said
    assert f"after {20 + result['tail']} tokens that an engine computes" in said
    assert main([*command, "--tail", "40"]) == 2
    assert "--tail needs --question" in capsys.readouterr().err
