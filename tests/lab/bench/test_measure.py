"""The work folder: nothing twice, and nothing of a run that was cut off."""

import pytest
import torch

from kvabr_lab.bench.measure import CacheStore
from tests import kvdata

pytestmark = pytest.mark.slow

SPEC = kvdata.spec()


def test_a_cache_is_computed_once_and_kept_in_the_published_type(tmp_path):
    made = kvdata.cache(SPEC, 20)
    first = CacheStore(tmp_path, SPEC).cache("a", 20, lambda: made)
    assert first.dtype == torch.float16
    again = CacheStore(tmp_path, SPEC).cache("a", 20, lambda: pytest.fail("computed again"))
    assert torch.equal(first, again)


def test_half_a_file_and_another_length_are_computed_again(tmp_path):
    store = CacheStore(tmp_path, SPEC)
    store.cache("a", 20, lambda: kvdata.cache(SPEC, 20))
    (path,) = tmp_path.glob("*/a.safetensors")
    path.write_bytes(path.read_bytes()[:100])
    assert store.cache("a", 20, lambda: kvdata.cache(SPEC, 20)).shape[3] == 20
    assert store.cache("a", 10, lambda: kvdata.cache(SPEC, 10)).shape[3] == 10


def test_results_outlive_a_run_and_a_torn_line(tmp_path):
    store = CacheStore(tmp_path, SPEC)
    assert store.known("x") is None
    assert store.keep("x", {"kl": 0.5}) == {"kl": 0.5}
    (journal,) = tmp_path.glob("*/results.jsonl")
    with journal.open("a") as file:
        file.write('{"key": "y", "val')
    again = CacheStore(tmp_path, SPEC)
    assert again.known("x") == {"kl": 0.5}
    assert again.known("y") is None
