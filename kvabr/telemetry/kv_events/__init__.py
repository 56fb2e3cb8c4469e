"""KV events: what caches there are, told to routers as vLLM tells it (``vllm.distributed.kv_events``).

`publisher` binds a ZeroMQ socket and tells the assets of a store, with the tokens that they are caches of; `subscriber`
hears engines and other origins. `wire` has the messages, `hashes` vLLM's names of blocks. The extra ``events`` brings
ZeroMQ.
"""
