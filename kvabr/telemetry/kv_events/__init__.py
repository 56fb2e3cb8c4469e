"""KV events: announcements of cached prompts to routers, in vLLM's format (``vllm.distributed.kv_events``).

`publisher` announces the assets of a store over ZeroMQ (extra ``events``), `subscriber` receives events of engines and
other origins, `wire` has the messages, `hashes` vLLM's block hashes.
"""
