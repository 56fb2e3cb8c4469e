"""A played cache as a safetensors file: one tensor, and what it is."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from kvabr.client.result import Played
from kvabr.store.files import replacing
from kvabr.types.errors import AssetError

FORMAT = "kvabr.cache/1"


def save(played: Played, path: Path) -> None:
    """Write the cache, whole or not at all: the tensor ``kv``, [layer, K/V, head, token, dim], and what it is.

    That is one string of metadata, ``kvabr``, JSON: ``format``, ``spec``, ``tokens`` (how many), ``tracks`` (one per
    group), ``namespace`` and ``catalog_sha256`` (null if all of it was recomputed), ``loss``.

    Raises:
        AssetError: it cannot be written; nothing is left behind.
    """
    catalog = played.catalog
    namespace = None if catalog is None else {"model": catalog.namespace.model, "prompt": catalog.namespace.prompt}
    facts = {
        "format": FORMAT,
        "spec": played.spec.to_json(),
        "tokens": played.tokens,
        "tracks": list(played.coverage),
        "namespace": namespace,
        "catalog_sha256": played.catalog_sha256,
        "loss": played.loss,
    }
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise AssetError(f"{path}: is no ordinary file, and is left alone; name another")
    try:
        with replacing(path) as file:
            # By its name: safetensors writes to a path alone.
            save_file({"kv": played.kv.contiguous()}, file.name, metadata={"kvabr": json.dumps(facts, sort_keys=True)})
    except SafetensorError as error:
        raise AssetError(f"{path}: cannot be written ({error})") from error
