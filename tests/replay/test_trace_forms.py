"""A known series, written in every form that people write: it is read back, or the reader asks. It never guesses."""

import math
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvabr.replay.readers import read
from kvabr.replay.readers.names import BYTES_PER_SECOND, TIME_UNITS
from kvabr.types.errors import TraceError

MBIT = 125_000.0
EPOCH = 1_700_000_000.0

TIMES = {
    "s": ("time_s", "Time (s)", "seconds", "elapsed_sec", "timeSeconds", "t [s]", "timestamp_s"),
    "ms": ("time_ms", "Time (ms)", "timestampMs", "epoch_ms", "time_msec", "milliseconds", "UNIX_TIME_MS"),
    "us": ("time_us", "timestamp (µs)", "ts_usec", "time_microseconds"),
    "ns": ("time (ns GMT)", "time_ns", "timestamp_nanos"),
    "minutes": ("time (minutes)", "elapsed_minutes"),
    "hours": ("time [h]", "time_hours"),
}
RATES = {
    "bit/s": ("bits_per_second", "download_bps", "Throughput (bit/s)", "bitsPerSecond", "bits/sec"),
    "kbit/s": (
        "kbps",
        "rate_kbps",
        "DL_bitrate (kbit/s)",
        "Bandwidth Kbits/sec",
        "Kb/s",
        "downlink kilobits per second",
    ),
    "Mbit/s": (
        "mbps",
        "download_mbps",
        "Throughput (Mbit/s)",
        "mbit_s",
        "goodput Mb/s",
        "rxMbps",
        "mbps_down",
        "avg_mbps",
    ),
    "Gbit/s": ("Gbps", "throughput_gbps", "rate (Gbit/s)"),
    "byte/s": ("bytes_per_second", "rx_bytes_per_sec", "rate (B/s)"),
    "kbyte/s": ("kB/s", "KBps", "throughput (kbyte/s)", "kilobytes_per_second"),
    "Mbyte/s": ("MB/s", "rx MB/s", "speed_MBps", "throughput (Mbytes/sec)"),
    "KiB/s": ("KiB/s", "rate (KiB/s)"),
    "MiB/s": ("MiB/s", "received MiB/s", "throughput_mebibytes_per_second"),
}
UNCLEAR_TIMES = ("time", "timestamp", "Time", "t", "time_fortnights", "when", "time (min)", "ms", "epoch")
UNCLEAR_RATES = (
    "throughput",
    "DL_bitrate",
    "MBPS",
    "mb/s",
    "kb/s",
    "Bps",
    "rate",
    "mbit",
    "kbits",
    "Speed",
    "value",
    "rx",
)
OTHERS = (
    *("rx_bytes", "received_bytes", "cum_bits", "size_bytes", "Speed", "Speed (km/h)", "upload_mbps", "UL_bitrate"),
    *("RSRP", "State", "max_mbps", "packets", "video_bitrate_kbps", "rtt_ms", "CellID", "duration_ms", "bytes"),
)
CALENDAR = (
    *("%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y.%m.%d_%H.%M.%S", "%Y/%m/%d %H:%M:%S", "%d.%m.%Y %H:%M:%S"),
    *("%Y-%m-%d %H:%M:%S CDT", "%Y-%m-%d %H:%M:%S+02:00", "%Y-%m-%d_%H-%M-%S", "%m/%d/%Y %H:%M:%S", "%H:%M:%S"),
)


@st.composite
def series(draw):
    """Draw seconds and bytes per second."""
    step = draw(st.sampled_from((0.1, 0.25, 1.0, 2.0, 5.0)))
    count = draw(st.integers(4, 12))
    origin = draw(st.sampled_from((0.0, 12.0, EPOCH)))
    rates = draw(st.lists(st.integers(400, 900_000), min_size=count, max_size=count))
    return [origin + index * step for index in range(count)], [rate / 1000 * MBIT for rate in rates]


STYLES = {"short": ".12g", "fixed": ".3f", "long": ".6f", "thousands": ",.3f", "whole": ",.0f"}


def written(value, style):
    """Write a number with a decimal point."""
    text = format(value, STYLES[style])
    return f"{value:.12f}".rstrip("0").rstrip(".") if "e" in text else text


@st.composite
def forms(draw):
    """Draw a file's text, and the series that it holds with how exact the text is."""
    times, rates = draw(series())
    unit = draw(st.sampled_from(list(RATES)))
    rate_name = draw(st.sampled_from((*RATES[unit] * 6, *UNCLEAR_RATES)))
    rate_style = draw(st.sampled_from(list(STYLES)))
    if draw(st.booleans()):
        time_unit = draw(st.sampled_from(list(TIMES)))
        names = (*TIMES[time_unit] * 4, *(UNCLEAR_TIMES if time_unit not in ("minutes", "hours") else ()))
        time_name = draw(st.sampled_from(names))
        stamps = [written(time / TIME_UNITS[time_unit], "short") for time in times]
    else:
        times = [EPOCH + index * 3 for index in range(len(times))]
        form = draw(st.sampled_from(CALENDAR))
        time_name = draw(st.sampled_from(("time", "Timestamp", "datetime", "date_time")))
        stamps = [datetime.fromtimestamp(time, UTC).strftime(form) for time in times]
    numbers = [written(rate / BYTES_PER_SECOND[unit], rate_style) for rate in rates]
    precise = [float(number.replace(",", "")) * BYTES_PER_SECOND[unit] for number in numbers]

    delimiter = draw(st.sampled_from(",;\t"))
    comma = draw(st.booleans())
    swap = str.maketrans(",.", ".,")
    columns = [[time_name, *(stamp.translate(swap) if comma and _numeric(stamp) else stamp for stamp in stamps)]]
    columns.append([rate_name, *(number.translate(swap) if comma else number for number in numbers)])
    for name in draw(st.lists(st.sampled_from(OTHERS), max_size=3, unique=True)):
        cells = draw(st.sampled_from(("counter", "text", "number")))
        made = {"counter": [str(index * 5_000_000) for index in range(len(times))], "text": ["-"] * len(times)}
        columns.append([name, *made.get(cells, [f"{10 + index}" for index in range(len(times))])])
    order = draw(st.permutations(range(len(columns))))
    rows = zip(*(columns[index] for index in order), strict=True)
    quote = draw(st.booleans())
    lines = [delimiter.join(f'"{cell}"' if quote and delimiter in cell else cell for cell in row) for row in rows]
    if draw(st.booleans()):
        lines.insert(0, f"sep={delimiter}")
    text = draw(st.sampled_from(("\n", "\r\n"))).join(lines)
    if len(set(times)) == 1 or not any(precise):
        text = ""
    encoding = draw(st.sampled_from(("utf-8", "utf-8-sig", "utf-16")))
    return text.encode(encoding), times, precise


def _numeric(text):
    return text.replace(".", "", 1).replace("-", "", 1).isdigit()


def outcome(path, form):
    """Return ``asks``, ``read`` or ``wrong``: the file is read as another series."""
    data, times, rates = form
    path.write_bytes(data)
    try:
        found = read(path)
    except TraceError:
        return "asks"
    if len(found) != 1:
        return "wrong"
    (trace,) = found
    step = times[1] - times[0]
    same = len(trace.times) == len(times)
    same = same and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(trace.rates, rates, strict=True))
    shifted = [time - times[0] for time in times]
    same = same and all(math.isclose(*pair, abs_tol=step / 20) for pair in zip(trace.times, shifted, strict=True))
    return "read" if same else "wrong"


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(forms())
def test_no_file_is_read_as_another_series(tmp_path, form):
    assert outcome(tmp_path / "made.csv", form) != "wrong", form[0].decode(
        "utf-16" if b"\0" in form[0] else "utf-8-sig"
    )


CLEAR = [
    (delimiter, mark, time, rate, ahead)
    for delimiter, mark in ((",", "."), (";", ","), ("\t", "."), (";", "."))
    for time, rate, ahead in zip(
        sorted((unit, name) for unit, names in TIMES.items() for name in names),
        sorted((unit, name) for unit, names in RATES.items() for name in names if name != "avg_mbps")[:40],
        ["", "sep"] * 40,
        strict=False,
    )
]


@pytest.mark.parametrize(("delimiter", "mark", "time", "rate", "ahead"), CLEAR)
def test_names_with_a_unit_are_read(tmp_path, delimiter, mark, time, rate, ahead):
    times, rates = [0.0, 1.0, 2.0, 3.0], [40.125 * MBIT, 12.5 * MBIT, 7.0 * MBIT, 99.75 * MBIT]
    lines = [f"{time[1]}{delimiter}{rate[1]}", f"sep={delimiter}"][:: -1 if ahead else 1][: 2 if ahead else 1]
    for second, value in zip(times, rates, strict=True):
        cells = (written(second / TIME_UNITS[time[0]], "short"), written(value / BYTES_PER_SECOND[rate[0]], "long"))
        lines.append(delimiter.join(cell.replace(".", mark) for cell in cells))
    path = tmp_path / "made.csv"
    path.write_text("\n".join(lines))
    (trace,) = read(path)
    assert trace.rates == pytest.approx(rates)
    assert all(after - before == pytest.approx(1.0) for before, after in pairwise(trace.times))
