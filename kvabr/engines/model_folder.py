"""SmolLM2 as a folder, for engines that load a model from one: configuration, weights in safetensors, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from kvabr.engines.transformers import smollm2
from kvabr.engines.require import require
from kvabr.store.files import write_text
from kvabr.types.errors import ModelError

DONE = "kvabr.json"
"""Written last: with it the folder is whole. It says what `kvabr` calls the model and its tokenizer."""


def smollm2_folder(path: Path, *, dtype: str = "float32") -> dict[str, str]:
    """Write the model into a folder, unless it is there.

    Args:
        path: the folder.
        dtype: element type of the weights; float32 is exact.

    Returns:
        ``model`` and ``tokenizer``: the names under which `kvabr encode` publishes its caches.

    Raises:
        ModelError: something is not installed, or the folder cannot be written.
    """
    done = path / DONE
    if done.is_file():
        names: dict[str, str] = json.loads(done.read_text())
        return names
    engine, tokenizer = smollm2.load()
    transformers = require("transformers")
    try:
        path.mkdir(parents=True, exist_ok=True)
        model = engine.model
        model.to(getattr(require("torch"), dtype)).save_pretrained(path)
        model.float()
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<|im_start|>",  # noqa: S106  # a token, not a password
            eos_token="<|im_end|>",  # noqa: S106
            pad_token="<|im_end|>",  # noqa: S106
        )
        fast.save_pretrained(path)
    except OSError as error:
        raise ModelError(f"{path}: the model cannot be written there ({error})") from error
    names = {"model": engine.spec.model, "tokenizer": engine.spec.tokenizer}
    write_text(done, json.dumps(names) + "\n")
    return names
