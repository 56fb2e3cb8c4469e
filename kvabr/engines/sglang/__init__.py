"""SGLang: a dynamic storage backend of HiCache, tested with the classes of SGLang 0.5.23 that load without a GPU.

A page of HiCache becomes an asset: encoded on several tracks when written, and played at the quality that the deadline
allows when prefetched. SGLang needs two options::

    --hicache-storage-backend dynamic --page-size 128
    --hicache-storage-backend-extra-config '{"backend_name": "kvabr", "module_path": "kvabr.engines.sglang.backend",
        "class_name": "KvabrStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
        "kvabr": {"url": "moqt://origin.example:4443/", "publish": "/srv/kvabr", "deadline_s": 1.0}}'

`kvabr.engines.chunk_store.KeyedSettings` has all keys. A page of 128 tokens is one group; smaller pages need a request
each. AC tracks need a codec profile (``profile``) and prefix keys. Only `backend` imports SGLang.
"""

from kvabr.engines.adapters import Adapter

ADAPTER = Adapter(
    name="sglang",
    package="sglang",
    module="kvabr.engines.sglang",
    tested=("0.5.23", "0.5.24"),
    mode="suffix",
    layout="pages of its memory pool",
    rate="the key prefill_rate",
    plays="blocking",
)
