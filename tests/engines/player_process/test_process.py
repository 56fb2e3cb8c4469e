"""Plays in a player process: real processes, a real origin, and the ways in which they end."""

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from kvabr.client.blocking import Background
from kvabr.client.options import PlayOptions
from kvabr.engines.clients import open_client
from kvabr.engines.player_process import client as remote
from kvabr.engines.player_process.sockets import own_socket
from kvabr.engines.settings import INSIDE, OWN, EngineSettings
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import NotFoundError, PlayError, TransportError, UsageError
from tests.client.served import LIMIT_S, Served
from tests.processes import gone
from tests.toymodel import SPEC, prompt, toy_asset

pytestmark = pytest.mark.process

TOKENS = list(prompt(70).tokens)
COST = PrefillCost.from_rate(1.0)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    toy_asset(folder / "one")
    served = Served(folder, tmp_path_factory.mktemp("tls"))
    yield served
    served.close()


@contextlib.contextmanager
def engine(served, player=OWN, **more):
    given = {"url": served.url, "fingerprint": served.fingerprint, "player": str(player)}
    with closing(Background(open_client(EngineSettings.read(given | more, "here")))) as client:
        yield client


def play(client, tokens=TOKENS, **options):
    async def ask(client):
        found = await client.find(tokens, model=SPEC, any_dtype=True, within_s=LIMIT_S)
        how = PlayOptions(policy="fixed:FP16", tail=0, **options)
        return await client.play_prefix(found, deadline=LIMIT_S, cost=COST, options=how)

    return client.begin(ask).result(LIMIT_S)


def link_of(client):
    return client._client._link.result()


def test_what_is_played_is_what_would_be_played_inside(served, home):
    with engine(served) as client, engine(served, INSIDE) as inside:
        played, wanted = play(client), play(inside)
        assert torch.equal(played.kv, wanted.kv)
        assert played.tokens == 70
        for name in ("units", "coverage", "loss", "cut", "spans", "spec"):
            assert getattr(played, name) == getattr(wanted, name)
        assert client.begin(lambda client: client.round_trip(probe_s=LIMIT_S)).result(LIMIT_S) > 0


def test_memory_is_used_for_one_play_after_the_other_and_never_for_two_at_once(served, home):
    with engine(served) as client:
        first, second = play(client), play(client)
        assert set(link_of(client)._regions) == {1, 2}
        assert torch.equal(first.kv, second.kv)
        kept = first.groups[0].payload
        wanted = bytes(kept)
        del first, second
        gc.collect()
        for _ in range(3):
            play(client)
        assert set(link_of(client)._regions) == {1, 2}  # a view of the first is left, the second is used again
        assert bytes(kept) == wanted


def test_plays_that_an_engine_keeps_take_none_of_its_descriptors(served, home):
    with engine(served) as client:
        kept = [play(client)]
        before = len(list(Path("/proc/self/fd").iterdir()))
        kept += [play(client) for _ in range(5)]
        assert len(link_of(client)._regions) == 6
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_goes_wrong_is_told_as_inside(served, home):
    with engine(served) as client:

        async def absent(client):
            await client.find_asset(f"{SPEC.model}/{'0' * 64}")

        with pytest.raises(NotFoundError):
            client.begin(absent).result(LIMIT_S)

        async def late(client):
            await client.play_coded(await client.find(TOKENS, model=SPEC), deadline=1e-6)

        with pytest.raises(PlayError, match="allow more"):
            client.begin(late).result(LIMIT_S)
        assert play(client).tokens == 70


def test_a_call_that_is_cancelled_ends(served, home):
    with engine(served) as client:
        play(client)

        for handle in [client.begin(lambda client: client.find([1] * 20, model=SPEC)) for _ in range(3)]:
            handle.cancel()
        assert play(client).tokens == 70
        assert link_of(client)._answers == {}


def stopped(pid):
    """Whether all threads of a process are stopped; the first of them may be before the others."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def test_a_process_that_dies_fails_its_calls_and_another_one_comes(served, home):
    with engine(served) as client:
        held = play(client)
        wanted, before = held.kv.clone(), remote._started[-1]
        before.send_signal(signal.SIGSTOP)
        while not stopped(before.pid):
            time.sleep(0.001)
        hanging = client.begin(lambda client: client.round_trip())
        before.kill()
        assert gone(before.pid)
        with contextlib.suppress(TransportError):  # a call sent after the end is answered by another process
            hanging.result(LIMIT_S)
        end_s = time.monotonic() + LIMIT_S
        while True:  # until this end has noticed
            try:
                again = play(client)
            except TransportError:
                assert time.monotonic() < end_s
            else:
                break
        assert torch.equal(again.kv, wanted)
        assert torch.equal(type(held)(**vars_of(held)).kv, wanted)  # what was played before stays readable
        assert remote._started[-1].pid != before.pid
        assert before not in remote._started  # nor a zombie


def test_a_process_that_hangs_is_not_waited_for(served, home, monkeypatch):
    with engine(served) as client, monkeypatch.context() as patch:

        async def hung(client):
            await client.find(TOKENS, model=SPEC, within_s=0.1)

        while True:  # until it has started
            with contextlib.suppress(TransportError):
                play(client)
                break
        patch.setattr(remote, "_ANSWER_S", 0.5)
        os.kill(remote._started[-1].pid, signal.SIGSTOP)
        try:
            with pytest.raises(TransportError, match="does not answer"):
                client.begin(hung).result(LIMIT_S)
        finally:
            os.kill(remote._started[-1].pid, signal.SIGCONT)
        patch.undo()
        assert play(client).tokens == 70


@contextlib.contextmanager
def full(path, waiting):
    """A process that listens and accepts nobody, with as many who wait as may."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(1)
        for _ in range(waiting):
            link = stack.enter_context(socket.socket(socket.AF_UNIX))
            link.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                link.connect(str(path))
        yield listener


@pytest.mark.parametrize("waiting", [0, 8], ids=["it takes nobody", "too many wait"])
def test_the_deadline_holds_while_the_process_starts(served, tmp_path, waiting, monkeypatch):
    """It listens, and still imports what it needs."""
    monkeypatch.setattr(remote, "_ANSWER_S", LIMIT_S)
    with full(tmp_path / "p", waiting), engine(served, tmp_path / "p") as client:

        async def find(client):
            with pytest.raises(TransportError, match=r"has not started within 0\.2 s"):
                await client.find(TOKENS, model=SPEC, within_s=0.2)

        client.begin(find).result(LIMIT_S / 2)


def test_a_policy_is_found_from_where_its_engine_is(served, home, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("from kvabr.abr.policies import Anytime\nclass Own(Anytime): pass\n")
    with engine(served) as client:
        play(client)  # by a process that runs elsewhere
        monkeypatch.chdir(tmp_path)

        async def ask(client):
            found = await client.find(TOKENS, model=SPEC, any_dtype=True, within_s=LIMIT_S)
            how = PlayOptions(policy="own.py:Own", tail=0)
            return await client.play_prefix(found, deadline=LIMIT_S, cost=COST, options=how)

        assert client.begin(ask).result(LIMIT_S).tokens == 70


def vars_of(played):
    """The fields of a play, without what was expanded before."""
    return {name: getattr(played, name) for name in played.__dataclass_fields__}


def test_engines_of_several_origins_and_processes_share_one(served, home, tmp_path):
    other = tmp_path / "two"
    toy_asset(other / "two", ("FP16",), tokens=40)
    with (
        closing(Served(other, tmp_path)) as served_too,
        engine(served) as one,
        engine(served_too) as two,
        engine(served) as three,
    ):
        assert play(one).tokens == 70
        assert play(two, list(prompt(40).tokens)).tokens == 40
        assert play(three).tokens == 70
        code = (
            "from types import SimpleNamespace\nfrom tests.engines.player_process.test_process import *\n"
            f"with engine(SimpleNamespace(url={served.url!r}, fingerprint={served.fingerprint!r})) as client:\n"
            "    print(play(client).tokens, remote._started)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
        assert done.stdout.split() == ["70", "[]"]


def test_a_process_that_does_not_start_is_not_started_for_every_request(served, home, monkeypatch):
    begun = []

    def start(path):
        begun.append(subprocess.Popen(["false"]))  # noqa: S607
        begun[-1].wait()
        monkeypatch.setattr(remote, "_started", begun)

    monkeypatch.setattr(remote, "start", start)
    monkeypatch.setattr(remote, "own_socket", lambda: home / "never.sock")
    with engine(served) as client:
        for _ in range(3):
            with pytest.raises(TransportError, match=r"does not start, see .*never\.log"):
                play(client)
    assert len(begun) == 1


def test_another_process_comes_for_one_that_was_about_to_end(served, home, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "ending"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(own_socket()))
    listener.listen()

    def end():
        link, _ = listener.accept()
        listener.close()
        link.close()

    ending = threading.Thread(target=end)
    ending.start()
    with engine(served) as client:
        assert play(client).tokens == 70
    ending.join()


def run(*words):
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "kvabr", "player", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_one_process_serves_a_socket_until_nobody_needs_it(served, home):
    path = home / "mine" / "p.sock"
    first = run("--socket", str(path), "--idle", "5")
    try:
        end_s = time.monotonic() + LIMIT_S
        while not path.exists():
            assert first.poll() is None
            assert time.monotonic() < end_s
            time.sleep(0.01)
        with engine(served, path) as client:  # or it might end before the others have started
            assert play(client).tokens == 70
            second = run("--socket", str(path))
            third = run("--socket", str(path), "--metrics", "127.0.0.1:0")
            assert second.communicate()[0] == f"a player process already serves {path}\n"
            assert second.returncode == 0
            assert "without --metrics already" in third.communicate()[0]
            assert third.returncode == 2
        assert first.communicate(timeout=LIMIT_S)[0].count("engine left") == 1
        assert first.returncode == 0
        assert not path.exists()
    finally:
        first.kill()


def until(process, said):
    while said not in (line := process.stdout.readline()):
        assert line, "it has ended"


def test_engines_join_again_once_there_are_descriptors(served, home):
    path = home / "few" / "p.sock"
    process = run("--socket", str(path))
    try:
        while "playing for engines" not in process.stdout.readline():
            assert process.poll() is None
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (32, 32))
        with contextlib.ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
            while "no engine can connect" not in process.stdout.readline():
                assert process.poll() is None
        with engine(served, path) as client:
            assert client.begin(lambda client: client.find(TOKENS, model=SPEC)).result(LIMIT_S) is not None
    finally:
        process.terminate()
        process.communicate()


def test_others_cannot_enter(home):
    folder = home / "open"
    folder.mkdir(mode=0o755)
    done = run("--socket", str(folder / "p.sock"))
    assert "no other user may enter it" in done.communicate()[0]
    assert done.returncode == 2
    done = run("--socket", str(home / ("long" * 40)))
    assert "at most 107 characters" in done.communicate()[0]
    assert done.returncode == 2


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n" + bytes(64), struct.pack("=QB", 1 << 40, 0), struct.pack("=QB", 4, 0) + b"\x80\x05N."],
    ids=["something else", "a huge message", "nothing that is known"],
)
def test_who_talks_nonsense_is_left_and_the_others_go_on(served, home, sent):
    with engine(served) as client:
        play(client)
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(own_socket()))
            link.sendall(sent)
            link.settimeout(LIMIT_S)
            while link.recv(1 << 16):
                pass  # it says why
        assert play(client).tokens == 70


def test_another_version_is_refused(served, home, monkeypatch):
    with engine(served) as client:
        play(client)
    monkeypatch.setattr(remote, "__version__", "0.0.1")
    with engine(served) as client, pytest.raises(UsageError, match=r"this engine has 0\.0\.1"):
        play(client)


def test_what_lies_in_the_working_directory_is_not_run(served, home, tmp_path, monkeypatch):
    (tmp_path / "kvabr").mkdir()
    (tmp_path / "kvabr" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "elsewhere"))
    with engine(served) as client:
        assert play(client).tokens == 70


def test_a_signal_ends_it(home):
    path = home / "signal" / "p.sock"
    for number, status in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):
        process = run("--socket", str(path))
        until(process, "playing for engines")
        os.kill(process.pid, number)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == status


def test_somebody_elses_folder_is_left_alone(home, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(home))
    taken = home / f"kvabr-{os.geteuid()}"
    assert own_socket().parent == taken
    taken.chmod(0o777)
    assert own_socket().parent == home / ".cache" / "kvabr" / "run"
    assert not list(taken.iterdir())
