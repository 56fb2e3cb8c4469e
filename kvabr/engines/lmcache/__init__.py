"""LMCache: a remote storage plug-in and an L2 adapter of its daemon, tested with LMCache 0.5.6.

A chunk of LMCache becomes an asset: encoded on several tracks when stored, and played at the quality that the deadline
allows when fetched. In LMCache's configuration::

    chunk_size: 256
    remote_storage_plugins: ["kvabr"]
    remote_serde: "naive"
    extra_config:
      remote_storage_plugin.kvabr.module_path: kvabr.engines.lmcache.connector
      remote_storage_plugin.kvabr.class_name: KvabrAdapter
      remote_storage_plugin.kvabr.url: moqt://origin.example:4443/
      remote_storage_plugin.kvabr.publish: /srv/kvabr
      remote_storage_plugin.kvabr.deadline_s: 1.0

`kvabr.engines.chunk_store.KeyedSettings` has all keys. ``publish`` is a folder for `kvabr serve`. AC tracks need a
codec profile of the model (``profile``).

The daemon of LMCache's multi-process mode loads an adapter by its arguments::

    --l2-adapter '{"type": "plugin", "module_path": "kvabr.engines.lmcache.daemon", "class_name": "KvabrL2",
        "adapter_params": {"url": "moqt://origin.example:4443/", "publish": "/srv/kvabr", "deadline_s": 1.0}}'

`serde` has kvabr's codecs for the daemon's own stores. Only `connector`, `daemon` and `serde` import LMCache.
"""

from kvabr.engines.adapters import Adapter

ADAPTER = Adapter(
    name="lmcache",
    package="lmcache",
    module="kvabr.engines.lmcache",
    tested=("0.5.6", "0.5.7"),
    mode="suffix",
    layout="chunks [K/V, layer, token, head x dim], of MLA without K/V",
    rate="the key prefill_rate",
    plays="async",
)
