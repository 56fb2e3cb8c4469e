"""SmolLM2 as a folder, for engines that load a model from one: configuration, weights in safetensors, tokenizer.

As a program: ``python -m tests.engines.smollm2_folder FOLDER``.
"""

import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers import PreTrainedTokenizerFast

from kvabr.engines.transformers import smollm2
from kvabr.store.files import write_text

DONE = "kvabr.json"
"""Written last: it marks the folder as complete and holds the names of the model and its tokenizer in catalogs."""


def smollm2_folder(path: Path, *, dtype: str = "float32") -> dict[str, str]:
    """Write the model into a folder, unless it is there; return its ``model`` and ``tokenizer`` names in catalogs."""
    done = path / DONE
    if done.is_file():
        names: dict[str, str] = json.loads(done.read_text())
        return names
    engine, tokenizer = smollm2.load()
    path.mkdir(parents=True, exist_ok=True)
    engine.model.to(getattr(torch, dtype)).save_pretrained(path)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",  # noqa: S106  # a token, not a password
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<|im_end|>",  # noqa: S106
    )
    template = GGUFReader(smollm2.find_gguf()).fields["tokenizer.chat_template"]
    fast.chat_template = bytes(template.parts[-1]).decode()
    fast.save_pretrained(path)
    names = {"model": engine.spec.model, "tokenizer": engine.spec.tokenizer}
    write_text(done, json.dumps(names) + "\n")
    return names


if __name__ == "__main__":
    smollm2_folder(Path(sys.argv[1]))
