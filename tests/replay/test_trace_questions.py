"""What a file leaves open is a question with an option; kinds of real files that are clear are read."""

import math
import os

import pytest

from kvabr.replay.readers import Columns, find, read, source
from kvabr.types.errors import TraceError, TraceQuestionError, UsageError

MBIT = 125_000.0
ROWS = [(second, 40 + 20 * math.sin(second)) for second in range(60)]


@pytest.fixture
def put(tmp_path):
    def write(text, name="a.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def table(header, line):
    return "\n".join([header, *(line(second, rate) for second, rate in ROWS)])


def is_right(path, **options):
    (trace,) = read(path, **options)
    assert trace.times == pytest.approx([second for second, _ in ROWS])
    assert trace.rates == pytest.approx([rate * MBIT for _, rate in ROWS], rel=1e-4)
    return True


@pytest.mark.parametrize(
    "text",
    [
        table("time_s,throughput_mbps,size_bytes", lambda s, r: f"{s},{r:.3f},1000000"),
        table("timestamp,received_bytes,bits_per_second", lambda s, r: f"{s},{int(r * 125000 * s)},{r * 1e6:.0f}"),
        table("time_s,downloaded_bytes,rate_kbps", lambda s, r: f"{s},{int(5e6 * s)},{r * 1000:.0f}"),
        table("timestamp,mbps", lambda s, r: f"{1700000000000 + s * 1000},{r:.3f}"),
        table("time (ns GMT),rate_mbps", lambda s, r: f"{1700000000000000000 + s * 10**9},{r:.3f}"),
        table("time_msec,mbps", lambda s, r: f"{s * 1000},{r:.3f}"),
        table("download,time,download_mbps,upload_mbps", lambda s, r: f"{r * 1e6:.0f},{s},{r:.3f},1"),
        "\n".join(f"{1700000000000 + second * 1000} {rate:.3f}" for second, rate in ROWS),
        "\n".join(f"{second},0\t{rate:.4f}".replace(".", ",") for second, rate in ROWS),
    ],
)
def test_what_is_clear_is_read(put, text):
    assert is_right(put(text))


@pytest.mark.parametrize(
    ("text", "option"),
    [
        (table("time_s,throughput,size_bytes", lambda s, r: f"{s},{r:.3f},1000000"), "--unit"),
        (table("time_s,MBPS", lambda s, r: f"{s},{r:.3f}"), "--unit"),
        (table("time_s,rx_bytes", lambda s, _: f"{s},{int(5e6 * s)}"), "--counter"),
        (table("time_s,cum_bits", lambda s, _: f"{s},{int(4e7 * s)}"), "--counter"),
        (table("time_s,rx", lambda s, _: f"{s},{int(4e7 * s)}"), "--counter"),
        (table("time_s,tx_bytes,rx_bytes_total", lambda s, _: f"{s},{s},{5000000 * (s % 30)}"), "--counter"),
        (table("time_s,bytes", lambda s, r: f"{s},{int(r * 125000)}"), "--rate-column"),
        (table("time_min,mbps", lambda s, r: f"{s / 60:.6f},{r:.3f}"), "--time-unit"),
        (table("date,time,mbps", lambda s, r: f"20240131,2359{s:02d},{r:.3f}"), "--time-unit"),
        (table("time_s,upload_mbps", lambda s, r: f"{s},{r:.3f}"), "--rate-column"),
        (table("time_s,lte_mbps,wifi_mbps", lambda s, r: f"{s},{r:.3f},{r:.3f}"), "--rate-column"),
        (table("Timestamp,Speed,State", lambda s, _: f"{s},60,D"), "--rate-column"),
        (table("Timestamp,Speed,DL_bitrate", lambda s, r: f"{s},60,{r * 1000:.0f}"), "--unit"),
        (table("time,mbps", lambda s, r: f"{s * 1000},{r:.3f}"), "--time-unit"),
        (table("time,mbps", lambda s, r: f"{s * 100},{r:.3f}"), "--time-unit"),
        (table("time,mbps", lambda s, r: f"{s / 86400},{r:.3f}"), "--time-unit"),
        (table("time (fortnights),mbps", lambda s, r: f"{s},{r:.3f}"), "--time-unit"),
        ("\n".join(f"{second * 1000} {rate:.3f}" for second, rate in ROWS), "--time-unit"),
        (table("time_s;mbps", lambda s, _: f"{s};{1 + s % 7}" + (",250" if s % 3 else "")), "--decimal"),
        (table('time_s,"mbps"', lambda s, r: f'{s},"{r:.3f}"'.replace(".", ",")), "--decimal"),
        (table("time_s;kbps", lambda s, r: f"{s};{r:.3f}"), "--decimal"),
        (table("time_s;kbps", lambda s, r: f"{s};{r:.3f}".replace(".", ",")), "--decimal"),
        # Units that are named, and numbers that make them doubtful.
        (table("time_s,Gbps", lambda s, r: f"{s},{r * 1000:.0f}"), "--unit"),
        (table("time_s,bps", lambda s, r: f"{s},{r:.0f}"), "--unit"),
        (table("time_s,mbps", lambda s, r: f"{s * 1000},{r:.0f}"), "--time-unit"),
        (table("time_hours,mbps", lambda s, r: f"{s},{r:.0f}"), "--time-unit"),
        ("".join(f"{1_600_000_000 + 86_400 * second}\n" for second in range(60)), "--format"),
    ],
)
def test_what_is_open_is_a_question(put, text, option):
    path = put(text)
    with pytest.raises(TraceQuestionError) as caught:
        read(path)
    assert caught.value.option == option
    assert isinstance(caught.value, UsageError)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (table("Timestamp,Speed,DL_bitrate", lambda s, r: f"{s},60,{r * 1000:.1f}"), {"unit": "kbps"}),
        (table("time,mbps", lambda s, r: f"{s * 1000},{r:.3f}"), {"time_unit": "msec"}),
        (table("time_s;mbps", lambda s, r: f"{s};{r:.4f}".replace(".", ",")), {"decimal": "comma"}),
        (table('time_s,"mbps"', lambda s, r: f'{s},"{r:.3f}"'.replace(".", ",")), {"decimal": "comma"}),
        (table("at,Speed,x", lambda s, r: f"{s},60,{r:.3f}"), {"time": "at", "rate": "x", "unit": "Mbit/s"}),
        ("\n".join(f"{second * 1000} {rate:.3f}" for second, rate in ROWS), {"time_unit": "ms"}),
        ("\n".join(f"{second} {rate * 1000:.3f}" for second, rate in ROWS), {"unit": "kbit/s"}),
        (table("time_min,mbps", lambda s, r: f"{s / 60:.12f},{r:.3f}"), {"time_unit": "min"}),
        (table("time_s,rx", lambda s, r: f"{s},{r:.3f}"), {"rate": "rx", "unit": "Mbit/s"}),
        (table("note,x_mbps", lambda _, r: f"a,{r:.3f}"), {"step_s": 1.0}),
    ],
)
def test_an_answer_is_taken(put, text, answer):
    assert is_right(put(text), columns=Columns(**answer))


def test_an_answer_confirms_what_seems_unlikely(put):
    path = put(table("time_s,Gbps", lambda s, r: f"{s * 1000},{r * 1000:.0f}"))
    with pytest.raises(TraceQuestionError):
        read(path, columns=Columns(unit="Gbit/s"))
    (trace,) = read(path, columns=Columns(unit="Gbit/s", time_unit="s"))
    assert trace.mean_rate > 1e12
    days = put("".join(f"{86_400_000 * day}\n" for day in range(60)))
    (trace,) = read(days, format_name="mahimahi")
    assert trace.duration_s == 59 * 86_400


def noon(second):
    """Return a time of day that begins half a minute before twelve."""
    return f"{'11:59' if second < 30 else '12:00'}:{(second + 30) % 60:02d}"


KINDS = {
    "times of the UCC data sets": table(
        "Timestamp,Speed,DL_bitrate_kbps", lambda s, r: f"2020.02.14_09.{38 + s // 60}.{s % 60:02d},4,{r * 1000:.0f}"
    ),
    "a zone's name": table("time,mbps", lambda s, r: f"2023-04-12 10:40:{s:02d} CDT,{r:.3f}"),
    "decimal commas of three digits": table("time_s;mbps", lambda s, r: f"{s};{r:.3f}".replace(".", ",")),
    "Excel's first line": "sep=;\n" + table("time_s;mbps", lambda s, r: f"{s};{r:.3f}"),
    "decimal commas": table("time_s;mbps", lambda s, r: f"{s};{r:.4f}".replace(".", ",")),
    "thousands": table("time_s;kbps", lambda s, r: f"{s};{r * 1000:,.2f}".translate(str.maketrans(",.", ".,"))),
    "binary prefixes": table("time_s,MiB/s", lambda s, r: f"{s},{r / 8.388608:.6f}"),
    "German dates": table("Zeit;time;mbps", lambda s, r: f"x;14.02.2020 09:38:{s:02d};{r:.3f}"),
    "times of day": table("time,mbps", lambda s, r: f"{'00:00' if s >= 30 else '23:59'}:{(s + 30) % 60:02d},{r:.3f}"),
    "12 hours": table("Time,mbps", lambda s, r: f"{noon(s)} {'AP'[s // 30]}M,{r:.3f}"),
    "date and time apart": table(
        "Date,Time,mbps", lambda s, r: f"{('31.01', '01.02')[s // 30]}.2024,{noon(s)} {'PA'[s // 30]}M,{r:.3f}"
    ),
    "ends as times of day": table(
        "start,end,mbps",
        lambda s, r: f"23:{s // 60:02d}:{s % 60:02d},23:{(s + 1) // 60:02d}:{(s + 1) % 60:02d},{r:.3f}",
    ),
    "short gaps between rows": table("start,end,mbps", lambda s, r: f"{s},{s + 0.25},{r:.3f}"),
    "a row for each neighbour": table("time_s,mbps", lambda s, r: f"{s},{r:.3f}\n{s},{r:.3f}"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_real_files(put, kind):
    assert is_right(put(KINDS[kind]))


COUNTED = [
    ("rx_bytes", 1.0, {}),
    ("node_network_receive_bytes_total", 1.0, {}),
    ("bytes received", 1.0, {}),
    ("ifHCInOctets", 1.0, {}),
    ("cum_bits", 8.0, {}),
    ("rx", 1e-6, {"unit": "Mbyte/s"}),
]


@pytest.mark.parametrize(("name", "per_byte", "answer"), COUNTED)
def test_a_counter_is_differenced(put, name, per_byte, answer):
    path = put(table(f"time_s,{name}", lambda s, _: f"{2 * s},{(7e9 + 1e6 * s * s) * per_byte:.6f}"))
    (trace,) = read(path, columns=Columns(counter=name, **answer))
    assert trace.times == tuple(range(0, 118, 2))
    assert trace.duration_s == 118
    assert trace.rates == pytest.approx([5e5 * (2 * second + 1) for second in range(59)])


def test_a_counter_that_starts_again_and_one_that_pauses(put):
    text = "time_s,rx_bytes\n0,5e6\n1,6e6\n2,-\n3,8e6\n4,0\n5,1e6\n5,1e6\n50,2e6\n51,3e6\n"
    traces = read(put(text), columns=Columns(counter="rx_bytes"))
    assert [trace.rates for trace in traces] == [(1e6, 1e6), (1e6,), (1e6,)]
    assert [trace.duration_s for trace in traces] == [3.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["speed (km/h)", "rtt_ms"])
def test_a_column_in_another_unit_is_no_rate(put, name):
    path = put(table(f"time_s,{name}", lambda s, r: f"{s},{r:.3f}"))
    with pytest.raises(TraceQuestionError) as caught:
        read(path, columns=Columns(rate=name))
    assert caught.value.option == "--rate-column"
    assert "not in its name" not in str(caught.value)
    assert is_right(path, columns=Columns(rate=name, unit="Mbit/s"))


@pytest.mark.parametrize("header", ["time,mbps,mbps", "time,time,mbps", "time,MBps,mbps"])
@pytest.mark.parametrize("answer", [{}, {"rate": "mbps"}])
def test_two_columns_of_one_name_are_refused(put, header, answer):
    with pytest.raises(TraceError) as caught:
        read(put(table(header, lambda s, r: f"{s},{s},{r:.3f}")), columns=Columns(**answer))
    assert header == "time,MBps,mbps" or not isinstance(caught.value, TraceQuestionError)


@pytest.mark.parametrize("time", ["23:59", "13:00:00 PM", "01/31/2024 23:59:30", "23:61:00"])
def test_times_in_no_known_form_are_refused(put, time):
    with pytest.raises(TraceError) as caught:
        read(put(f"time,mbps\n{time},1\n"))
    assert not isinstance(caught.value, TraceQuestionError)
    assert time in str(caught.value)


@pytest.mark.parametrize("gap", [" ", ","])
def test_no_rate_is_held_over_an_hour(put, gap):
    head = "time_s,mbps\n" if gap == "," else ""
    text = head + "".join(f"{s if s < 30 else s + 3600}{gap}{r:.3f}\n" for s, r in ROWS)
    assert [trace.duration_s for trace in read(put(text))] == [30.0, 30.0]


def test_what_is_no_ordinary_file_is_refused_at_once(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, find([pipe])[0]):
        with pytest.raises(TraceError):
            read(path)


def test_rows_are_bounded(put, monkeypatch):
    monkeypatch.setattr(source, "MAX_ROWS", 3)
    for text in ("time_s,mbps\n0,1\n1,1\n2,1\n", "0 1\n1 1\n2 1\n3 1\n"):
        with pytest.raises(TraceError):
            read(put(text))


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        ("0,1\n", {"counter": "rx"}),
        ("0,1\n0,2\n1,3\n", {"counter": "rx"}),
        ("0,1\n1,2\n", {"counter": "rx", "rate": "rx"}),
        ("0,1\n1,2\n", {"counter": "tx"}),
        ("0,5,40,1\n1,0,12,5\n", {"rate": "rx", "unit": "byte/s"}),  # decimal commas
        ("0,1_0\n1,1_0\n", {"rate": "rx", "unit": "byte/s"}),
    ],
)
def test_rows_that_give_no_rate(put, rows, answer):
    with pytest.raises(TraceError):
        read(put("time_s,rx\n" + rows), columns=Columns(**answer))
