"""Play a cache from an origin, and print the result.

    python examples/play.py moqt://127.0.0.1:4443/ prompt.json [FINGERPRINT]

`prompt.json` is a list of token ids, or a file of the store's `private/`. `kvabr serve --dev` prints the fingerprint.
"""

import json
import sys
from pathlib import Path

import kvabr

if len(sys.argv) not in (3, 4):
    sys.exit(__doc__)
url, prompt, *fingerprint = sys.argv[1:]
tokens = json.loads(Path(prompt).read_text())
if isinstance(tokens, dict):
    tokens = tokens["tokens"]  # a file of the store's `private/`
with kvabr.Client(url, kvabr.PeerOptions(fingerprint=fingerprint[0] if fingerprint else None)) as client:
    try:
        played = client.play(tokens, deadline=2.0)
    except kvabr.IncompleteError as error:
        print(error)
        played = error.prefix  # the part before the first missing group, or None
if isinstance(played, kvabr.Played):
    print(f"{played.tokens} of {len(tokens)} tokens after {played.ttft_s:.2f} s, loss {played.loss:.2g}")
    print("tracks:", ", ".join(played.coverage))
elif played is None:
    print("nothing of this prompt came in time")
else:
    print("no part of this prompt is cached")
