"""sabre, and the Ghent 4G logs in its repository: JSON.

A list of entries with ``duration_ms``, ``bandwidth_kbps`` and, in most files, ``latency_ms``. sabre adds the latency
once to every request, so it is a round trip time. The trace has its mean over time. Source:
https://github.com/UMass-LIDS/sabre, README and src/sabre.py.
"""

from __future__ import annotations

from kvabr.replay.readers.names import BYTES_PER_SECOND
from kvabr.replay.readers.source import Head, Sample, TraceFile, build
from kvabr.replay.trace import Trace


def is_sabre(head: Head) -> bool:
    """Return True if a file looks like this format."""
    return head.text.startswith("[") and '"bandwidth_kbps"' in head.text and '"duration_ms"' in head.text


def parse_sabre(source: TraceFile) -> list[Trace]:
    """Read a file; raise `TraceError` if it is not of this format."""
    entries = source.json()
    if not isinstance(entries, list):
        raise source.error("not a JSON list of segments; is this sabre?")
    samples: list[Sample] = []
    waited, known = 0.0, True
    now = 0.0
    for place, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or "duration_ms" not in entry or "bandwidth_kbps" not in entry:
            raise source.error("it must have duration_ms and bandwidth_kbps", place, "entry")
        duration = source.number(entry["duration_ms"], "duration_ms", place, "entry")
        if not duration > 0:
            raise source.error(
                f"duration_ms must be positive, got {duration:g}; correct or remove the entry", place, "entry"
            )
        rate = source.number(entry["bandwidth_kbps"], "bandwidth_kbps", place, "entry") * BYTES_PER_SECOND["kbit/s"]
        samples.append(Sample(place, now / 1000, (now + duration) / 1000, rate))
        now += duration
        if "latency_ms" in entry:
            waited += source.number(entry["latency_ms"], "latency_ms", place, "entry") * duration
        else:
            known = False
    return [build(source, samples, rtt_s=waited / now / 1000 if known and now else None, unit="entry")]
