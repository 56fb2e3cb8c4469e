"""Names, specs and layouts of LMCache's chunks; none of it needs LMCache."""

import pytest
import torch

from kvabr.engines.chunk_store import KeyedSettings, key_digests, namespace
from kvabr.engines.lmcache.chunks import Places, as_kv, read_settings, spec_of
from kvabr.types.errors import FormatError, UsageError

SHAPE = (3, 2, 256, 2, 16)
SPEC = spec_of("org/model", SHAPE, torch.float16)
P = "remote_storage_plugin.kvabr."


def test_a_chunk_is_found_by_its_key_whatever_its_length():
    for tokens, groups in ((256, 2), (128, 1), (100, 1), (300, 3)):
        digests = key_digests(SPEC, "m@1@0@ab@half", tokens)
        assert len(set(digests)) == len(digests) == groups
        assert digests[-1] == namespace(SPEC, "m@1@0@ab@half").prompt
    assert not set(key_digests(SPEC, "m@1@0@ab@half", 256)) & set(key_digests(SPEC, "m@1@1@ab@half", 256))


def test_specs():
    assert (SPEC.layers, SPEC.kv_heads, SPEC.head_dim, SPEC.dtype) == (3, 2, 16, "float16")
    assert SPEC.digest() != spec_of("org/model", SHAPE, torch.bfloat16).digest()
    assert spec_of("org/model~0123", SHAPE, torch.float16).model == "org/model~0123"
    with pytest.raises(FormatError, match="MLA"):
        spec_of("m", (3, 1, 256, 2, 576), torch.bfloat16)
    with pytest.raises(FormatError, match="quantises"):
        spec_of("m", SHAPE, torch.float8_e4m3fn)


def test_the_layout_is_a_view():
    chunk = torch.arange(2 * 3 * 5 * 32, dtype=torch.float32).reshape(2, 3, 5, 32)
    kv = as_kv(chunk, SPEC)
    assert kv.shape == SPEC.shape(5)
    for layer, which, head, token in ((0, 0, 0, 0), (2, 1, 1, 4), (1, 0, 1, 3)):
        assert torch.equal(kv[layer, which, head, token], chunk[which, layer, token, head * 16 : head * 16 + 16])
    kv[1, 1, 0, 2, 3] = -7.0
    assert chunk[1, 1, 2, 3] == -7.0
    for wrong in (chunk[:1], chunk[:, :2], chunk[..., :31], chunk[0]):
        with pytest.raises(FormatError, match="a chunk must have the shape"):
            as_kv(wrong, SPEC)


def test_of_mla_a_chunk_has_one_vector_of_a_token():
    spec = spec_of("m", (3, 1, 256, 1, 576), torch.bfloat16)
    assert (spec.only.kind, spec.only.k_dim, spec.only.v_dim) == ("latent", 576, 0)
    chunk = torch.arange(3 * 5 * 576, dtype=torch.float32).reshape(1, 3, 5, 576)
    for same in (chunk, chunk[0]):
        kv = as_kv(same, spec)
        assert kv.shape == spec.shape(5)
        assert torch.equal(kv[2, 0, 0, 4], chunk[0, 2, 4])
        assert kv.data_ptr() == chunk.data_ptr()
    with pytest.raises(FormatError, match=r"must have the shape \[1, 3, tokens, 576\]"):
        as_kv(torch.zeros(2, 3, 5, 576), spec)


class Hasher:
    """Hashes as LMCache's `TokenHasher` does: numbers of the chunk behind those of the ones before."""

    none_hash, chunk_size = b"none", 2

    def hash_tokens(self, tokens, prefix_hash=None):
        return (prefix_hash or self.none_hash) + bytes(tokens)

    @staticmethod
    def hash_to_bytes(hashed):
        return hashed


def test_the_daemons_hasher_tells_where_chunks_begin():
    class Watched(Hasher):
        pass

    places, hasher = Places(), Watched()
    places.watch_hasher(Watched)
    places.watch_hasher(Watched)
    assert Watched.hash_tokens.__wrapped__ is Hasher.hash_tokens
    first = hasher.hash_tokens([1, 2])
    second = hasher.hash_tokens([3, 4], first)
    assert [places.at(each) for each in (first, second)] == [0, 2]
    assert places.at(hasher.hash_tokens([3, 4], b"of somewhere else")) is None


def test_settings(tmp_path):
    settings = read_settings({
        "other": 1, f"{P}module_path": "x", f"{P}class_name": "y",
        f"{P}url": "moqt://origin.example/", f"{P}publish": str(tmp_path), f"{P}deadline_s": 2, f"{P}store_mib": 0,
    })  # fmt: skip
    assert settings == KeyedSettings(url="moqt://origin.example/", publish=tmp_path, deadline_s=2.0, store_mib=0)
    second = read_settings({"remote_storage_plugin.kvabr.b.publish": "b", f"{P}publish": "a"}, "kvabr.b")
    assert str(second.publish) == "b"
    with pytest.raises(UsageError, match=r"extra_config, remote_storage_plugin\.kvabr\.\*: unknown key 'deadline'"):
        read_settings({f"{P}url": "moqt://origin.example/", f"{P}deadline": 1})


class Database:
    """Cuts prompts as LMCache's token database does, two tokens each: numbers stand in for hashes and keys."""

    def process_tokens(self, tokens=None, hashes=None, offsets=None, mask=None):
        if tokens is None:
            yield from ((2 * place, 2 * place + 2, one) for place, one in enumerate(hashes))
            return
        for first in range(mask or 0, len(tokens), 2):
            yield first, first + 2, hash(tuple(tokens[: first + 2]))


def test_the_database_that_cuts_a_prompt_tells_where_its_chunks_begin():
    class Watched(Database):
        pass

    places = Places()
    places.watch(Watched)
    places.watch(Watched)  # no more than once
    assert Watched.process_tokens.__wrapped__ is Database.process_tokens
    chunks = list(Watched().process_tokens([1, 2, 3, 4, 5, 6], None, None, 2))
    assert chunks == list(Database().process_tokens([1, 2, 3, 4, 5, 6], None, None, 2))
    assert [places.at(key) for _, _, key in chunks] == [2, 4]
    assert places.at(hash((1, 2))) is None  # was left out
    # Hashes need not be those of a whole prompt.
    assert list(Watched().process_tokens(hashes=[77], offsets=[2])) == [(0, 2, 77)]
    assert places.at(77) is None
