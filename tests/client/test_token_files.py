"""Tokens in files: wherever a token can be given, a file with one can be given as well."""

import pytest

from kvabr.cli.main import main
from kvabr.client.blocking import Client
from kvabr.client.options import PlayOptions
from kvabr.link.moqt.connect import connect
from kvabr.types.errors import UnauthorizedError, UsageError
from kvabr.types.peer import PeerOptions
from tests.client.served import LIMIT_S, Served
from tests.client.test_play import close
from tests.toymodel import SPEC, prompt

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("alone")]

TOKEN = "a token in a file"  # noqa: S105
TOKENS = prompt(70).tokens


@pytest.fixture(scope="module")
def served(root, tmp_path_factory):
    with Served(root / "short", tmp_path_factory.mktemp("served"), token=TOKEN) as made:
        yield made


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.mark.parametrize("command", ["fetch", "inspect", "doctor"])
def test_commands(served, short, file, capsys, command):
    asset = f"{served.url}#kvcache:{short.namespace.model}/{short.namespace.prompt}"
    words = [command, served.url if command == "doctor" else asset]
    words += ["--fingerprint", served.fingerprint, "--quic", "aioquic", "--timeout", str(LIMIT_S)]
    words += ["--deadline", str(LIMIT_S)] if command == "fetch" else []
    assert main([*words, "--token-file", str(file)]) == 0
    capsys.readouterr()
    assert main(words) == 1
    assert "token" in "".join(capsys.readouterr())
    assert main([*words, "--token", TOKEN]) == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read"), (b"", "is empty"), (b"\xff", "cannot be read"), (b"a\0b", "printable")],
)
def test_a_file_without_a_token(tmp_path, capsys, content, says):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        connect("moqt://127.0.0.1:1/", PeerOptions(token_file=path))
    assert main(["inspect", "moqt://127.0.0.1:1/#kvcache:m/" + "0" * 64, "--token-file", str(path)]) == 2
    assert f"--token-file {path}: " in capsys.readouterr().err


INT8 = PlayOptions(policy="fixed:Int8")


def test_a_client_reads_it_again_when_it_connects(served, file):
    how = PeerOptions(token_file=file, fingerprint=served.fingerprint, quic="aioquic", timeout_s=LIMIT_S)
    with Client(served.url, how, model=SPEC, options=INT8) as client:
        assert close(client.play(TOKENS, deadline=LIMIT_S, options=INT8).kv, error=1e-3)
        file.write_text("a wrong one")
        served.kill()
        served.start()
        with pytest.raises(Exception, match="token") as error:
            client.play(TOKENS, deadline=LIMIT_S)
        assert isinstance(error.value, UnauthorizedError) or "UNAUTHORIZED" in str(error.value)
        file.write_text(TOKEN)
        assert close(client.play(TOKENS, deadline=LIMIT_S, options=INT8).kv, error=1e-3)
