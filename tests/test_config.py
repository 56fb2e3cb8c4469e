"""The configuration file: where it is found, what it changes, and what is said of its mistakes."""

import re
from pathlib import Path

import pytest

from kvabr.cli import config
from kvabr.cli.doctor import _configuration
from kvabr.cli.main import main, parse
from kvabr.types.errors import UsageError

GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "configuration.md"
URL = "moqt://origin.example/"


@pytest.fixture
def write(tmp_path, monkeypatch):
    def write(text, name="given.toml"):
        path = tmp_path / name
        path.write_text(text)
        monkeypatch.setenv("KVABR_CONFIG", str(path))
        return path

    return write


def test_options_of_the_file_are_defaults_and_the_command_line_wins(write):
    write('[fetch]\ndeadline = 0.5\npolicy = "rate"\nout = "c.safetensors"\nquic = "aioquic"\n[replay]\ndeadline = 7\n')
    args = parse(["fetch", URL, "--policy", "mpc"])
    assert (args.deadline, args.policy, args.quic) == (0.5, "mpc", "aioquic")
    assert parse(["replay", "-d", "1"]).deadline == 1.0
    assert parse(["replay"]).deadline == 7.0
    assert parse(["lab", "traces", "--out", "x"]).deadline != 7.0


def test_lists_flags_repeated_and_required_options(write):
    write(
        '[replay]\npolicy = ["mpc", "rate"]\nverify = true\nlive = false\n'
        '[encode]\ntokens = 64\ntext = "book.txt"\nout = "asset"\n'
        '[serve]\nlimit = ["connections=7"]\n'
        '[bench.codec]\njson = "speed.json"\n'
    )
    args = parse(["replay", "traces"])
    assert args.policy == ["mpc", "rate"]
    assert (args.verify, args.live) == (True, False)
    args = parse(["encode"])
    assert args.tokens == 64
    assert parse(["serve", "x", "--limit", "streams=3"]).limit == ["connections=7", "streams=3"]
    assert parse(["bench", "codec"]).json.name == "speed.json"


def test_files_are_relative_to_the_file_and_may_begin_with_home(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    write('[fetch]\nca = "ca.pem"\nout = "~/c.safetensors"\n')
    args = parse(["fetch", URL])
    assert args.ca == tmp_path / "ca.pem"
    assert args.out == Path("/home/somebody/c.safetensors")


def test_what_excludes_an_option_of_the_command_line_is_taken_back(write):
    write('[fetch]\nca = "ca.pem"\ntoken = "secret"\n')
    args = parse(["fetch", URL, "--fingerprint", "ab"])
    assert (args.ca, args.fingerprint, args.token) == (None, "ab", "secret")
    assert parse(["fetch", URL]).ca is not None


def test_a_mistake_of_another_command_is_none_of_this_one(write):
    write("[fetch]\ndeadlin = 2")
    assert parse(["replay"]).deadline == 2.0
    assert "deadlin" in _configuration().detail  # which looks at all


def test_which_file_is_read(tmp_path, monkeypatch):
    here, home = tmp_path / "here", tmp_path / "config"
    here.mkdir()
    (home / "kvabr").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.delenv("KVABR_CONFIG")
    if config.places()[1].parent != home / "kvabr":
        pytest.skip("this system has its configuration elsewhere")
    assert _configuration().detail.startswith("none (kvabr.toml, ")
    (home / "kvabr" / "kvabr.toml").write_text("[replay]\ndeadline = 5")
    assert parse(["replay"]).deadline == 5.0
    (here / "kvabr.toml").write_text("[replay]\ndeadline = 6")
    assert parse(["replay"]).deadline == 6.0
    other = tmp_path / "other.toml"
    other.write_text("[replay]\ndeadline = 7")
    monkeypatch.setenv("KVABR_CONFIG", str(other))
    assert parse(["replay"]).deadline == 7.0
    monkeypatch.setenv("KVABR_CONFIG", "")
    assert parse(["replay"]).deadline == 2.0
    monkeypatch.setenv("KVABR_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match=r"none\.toml: no such file"):
        parse(["replay"])


def test_doctor_says_which_file_is_read_and_what_is_wrong_with_it(write, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    path = write("[replay]\ndeadline = 5", "k.toml")
    main(["doctor"])
    assert str(path) in capsys.readouterr().out
    write("[replay]\ndeadlin = 5", "k.toml")
    assert main(["doctor"]) == 1
    assert "did you mean 'deadline'?" in " ".join(capsys.readouterr().out.split())


def test_the_examples_of_the_guide_are_right(write):
    blocks = re.findall(r"^```toml[^\n]*\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        path = write(block)
        found = _configuration()
        assert (found.state, found.detail) == ("ok", str(path))
