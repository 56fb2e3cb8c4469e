"""Pictures in the real vLLM: a published prompt is played for the same picture, and for no other."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

import numpy as np
from PIL import Image

from tests.engines.vllm.engine import TEXT, RealEngine, transfer_of
from tests.engines.vllm.tinies import tiny_blip
from tests.engines.vllm.world import SMALL, VllmWorld

pytestmark = pytest.mark.model

PROMPT, SAID = list(TEXT.encode()[:300]), 16


def picture(seed, size=40):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8))


class World(VllmWorld):
    def __init__(self, folder):
        super().__init__(folder)
        extra = self.playing() | self.publishing("FP16")
        options = SMALL | {"skip_tokenizer_init": False}
        self.engine = RealEngine(tiny_blip(folder / "model"), extra, transfer=transfer_of(extra), **options)


def test_the_cache_of_a_prompt_is_that_of_its_picture(world):
    """The prompt of 500 tokens begins with the 200 of its picture, so that no group of two others is alike."""

    def says(image, name=None, settings=None, **params):
        media = {"multi_modal_data": {"image": image}}
        media |= {} if name is None else {"multi_modal_uuids": {"image": name}}
        media |= {} if settings is None else {"mm_processor_kwargs": settings}
        world.engine.llm.llm_engine.reset_mm_cache()  # else a name stands for the picture that came first with it
        return world.says(PROMPT, SAID, media=media, **params)

    pictures = {"one": picture(1), "other": picture(2), "larger": picture(1, 48)}
    cold = {name: says(image, play=False, publish=name == "one")[0] for name, image in pictures.items()}
    dull = {"do_rescale": False}
    cold["dull"], _ = says(pictures["one"], settings=dull, play=False)
    assert len({tuple(text) for text in cold.values()}) == 4
    world.origin.wait_for_assets()
    for name, told, settings, tokens in [
        ("one", None, None, 384),
        ("one", "mine", None, 384),
        ("other", "mine", None, 0),
        ("larger", None, None, 0),
        ("dull", None, dull, 0),
    ]:
        text, counted = says(pictures.get(name, pictures["one"]), told, settings)
        assert (text, counted.get("tokens_loaded", 0)) == (cold[name], tokens), (name, told)
