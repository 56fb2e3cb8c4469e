"""Play a cache, and see its telemetry: JSON lines, Prometheus metrics, and every decision.

    python examples/telemetry.py moqt://127.0.0.1:4443/ prompt.json [FINGERPRINT]

`prompt.json` is a list of token ids, or a file of the store's `private/`. Writes plays.jsonl into the current folder.
"""

import json
import sys
from pathlib import Path

import kvabr
from kvabr.telemetry import JsonLines, PlayerMetrics, Telemetry
from kvabr.types.events import DecisionMade, PlayEvent

if len(sys.argv) not in (3, 4):
    sys.exit(__doc__)
url, prompt, *fingerprint = sys.argv[1:]
tokens = json.loads(Path(prompt).read_text())
if isinstance(tokens, dict):
    tokens = tokens["tokens"]  # a file of the store's `private/`


def show(event: PlayEvent) -> None:
    """Print each decision with its reason. Events are dataclasses, see `kvabr.types.events`."""
    if isinstance(event, DecisionMade):
        print(f"{1000 * event.t:7.1f} ms  {event.kind} group {event.group} on {event.track}: {event.reason}")


metrics = PlayerMetrics()
with (
    Telemetry(JsonLines("plays.jsonl"), metrics) as telemetry,
    kvabr.Client(url, kvabr.PeerOptions(fingerprint=fingerprint[0] if fingerprint else None)) as client,
):
    options = kvabr.PlayOptions(log=show, telemetry=telemetry)
    played = client.play(tokens, deadline=2.0, options=options)
print(metrics.expose())
