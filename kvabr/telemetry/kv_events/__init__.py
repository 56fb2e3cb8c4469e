"""KV events: announcements of cached prompts to routers, in vLLM's format (``vllm.distributed.kv_events``).

`publisher` announces a store's assets over ZeroMQ (extra ``events``); `subscriber` receives events of engines and
origins.
"""
