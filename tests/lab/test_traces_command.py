"""`kvabr traces` through the command line."""

import json

import pytest

from kvabr.cli.main import main
from kvabr.replay.readers import read
from kvabr_lab.cli.traces import dumps


def run(*words):
    return main(["traces", *map(str, words)])


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_synth_names_the_command_that_makes_the_file_again(tmp_path, capsys):
    first, second = tmp_path / "a.csv", tmp_path / "b.csv"
    options = ["--mean-mbps", 400, "--duration", 60, "--step", 0.1, "--seed", 7, "--outage", 1.5, "--rtt", 25]
    assert run("synth", "outages", *options, "--name", "mmwave/corner", "--out", first) == 0
    assert "400.00 Mbit/s over 60 s" in capsys.readouterr().out
    (trace,) = read(first)
    assert (trace.name, trace.family, trace.rtt_s) == ("mmwave/corner", "mmwave", 0.025)
    note = next(line for line in first.read_text().splitlines() if line.startswith("# note: "))
    words = note.removeprefix("# note: kvabr traces ").split()
    assert run(*words, "--out", second) == 0
    assert second.read_bytes() == first.read_bytes()


def test_import_loses_nothing_and_keeps_names(tmp_path, capsys):
    source = tmp_path / "road" / "log.csv"
    source.parent.mkdir()
    source.write_text("start,end,mbps\n0,1,8\n1,2,16\n50,51,8\n")
    out = tmp_path / "out"
    assert run("import", source.parent, "--out", out) == 0
    assert "2 traces" in capsys.readouterr().out
    made = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.csv"))
    assert made == ["road/log-0001.csv", "road/log-0002.csv"]
    assert [read(out / name)[0] for name in made] == read(source)
    assert run("import", out, "--out", tmp_path / "again") == 0
    assert (tmp_path / "again" / made[0]).read_text().splitlines()[-3:] == (out / made[0]).read_text().splitlines()[-3:]


def test_import_stays_inside_its_folder(tmp_path):
    (tmp_path / "we ird;$(x)").write_text("0 1\n1 2\n")
    out = tmp_path / "out"
    assert run("import", tmp_path / "we ird;$(x)", "--out", out) == 0
    (made,) = out.rglob("*.csv")
    assert made.name == "we_ird___x_.csv"


@pytest.mark.usefixtures("wide")
def test_info_prints_and_writes_what_it_measured(tmp_path, capsys):
    source, out = tmp_path / "walk", tmp_path / "info.json"
    source.write_text("0 0\n1 8\n2 16\n")
    assert run("info", source, "--json", out) == 0
    shown = capsys.readouterr().out
    for word in ("pensieve", "8.00", "0.82", "33%", "█"):
        assert word in shown
    report = json.loads(out.read_text())
    assert report["schema"] == "kvabr.traces/1"
    (row,) = report["traces"]
    assert (row["file"], row["format"], row["mean_mbps"], row["duration_s"]) == (str(source), "pensieve", 8.0, 3.0)


@pytest.mark.parametrize("action", ["info", "import"])
def test_a_bad_file_in_a_folder_does_not_stop_the_others(tmp_path, capsys, action):
    source, out = tmp_path / "set", tmp_path / "out"
    source.mkdir()
    for name, text in {"a.csv": "time_s,rx_bytes\n0,1\n1,2\n2,3\n", "b": "0 8\n1 8\n", "c": "0 8\n0 8\n"}.items():
        (source / name).write_text(text)
    assert run(action, source, *(["--out", out] if action == "import" else ["--json", out])) == 1
    said = capsys.readouterr()
    assert "a.csv" in said.err
    assert "--counter" in said.err
    assert str(source / "c") in said.err
    if action == "info":
        assert [row["file"] for row in json.loads(out.read_text())["traces"]] == [str(source / "b")]
    else:
        assert [path.name for path in out.rglob("*.csv")] == ["b.csv"]
    assert run("info", source / "a.csv", "--counter", "rx_bytes", "--unit", "Mbyte/s") == 0


@pytest.mark.usefixtures("wide")
def test_info_by_family_weights_by_time(tmp_path, capsys):
    (tmp_path / "SOURCE.txt").write_text("by hand\n")
    (tmp_path / "long").write_text("0 2\n3 2\n")
    (tmp_path / "short").write_text("0 8\n1 8\n")
    assert run("info", tmp_path, "--families") == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "pensieve" in line)
    assert row.split()[1:] == ["pensieve", "2", "2", "4.00", "8.00", "3.50", "2.00", "8.00", "0%"]


def test_columns_can_be_named(tmp_path, capsys):
    source = tmp_path / "log"
    source.write_text("at,dl\n0,8\n500,8\n")
    assert run("info", source) == 2
    assert "unknown trace format" in capsys.readouterr().err
    named = ["--time-column", "at", "--rate-column", "dl", "--unit", "kbit/s", "--time-unit", "ms"]
    assert run("import", source, *named, "--out", tmp_path / "out") == 0
    assert dumps(read(next((tmp_path / "out").rglob("*.csv")))[0]).endswith("0,8000\n0.5,8000\n1,end\n")
    assert run("info", source, "--format", "pensieve", *named) == 2
