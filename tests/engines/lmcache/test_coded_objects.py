"""Objects of LMCache's daemon as bytes of a fixed length; none of it needs LMCache."""

import random
from dataclasses import replace

import pytest
import torch

from kvabr.codec.profile import Profile
from kvabr.engines.lmcache.chunks import ObjectLayout
from kvabr.engines.lmcache.coded_objects import ObjectCoder, SerdeSettings
from kvabr.types.errors import ForeignError, FormatError, KvabrError, NotFiniteError
from tests import kvdata

LAYERS, HEADS, DIM = 2, 2, 32
SHAPE = kvdata.spec(LAYERS, HEADS, DIM)
LAYOUT = ObjectLayout(((2, LAYERS, 200, HEADS * DIM),), (torch.float16,))


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.safetensors"
    path.write_bytes(kvdata.profile(SHAPE).to_bytes())
    return path


def raw(tensor):
    return memoryview(tensor.contiguous().view(torch.uint8).flatten().numpy()).cast("B")


def chunk_at(position):
    kv = kvdata.cache(SHAPE, position + 200)[:, :, :, position:]
    return kv.permute(1, 0, 3, 2, 4).flatten(3).half().contiguous()


def coded(coder, chunk, position=None, name="name", layout=LAYOUT):
    made = coder.encode(name, layout, raw(chunk), chunk, position)
    assert len(made) == coder.size(layout)
    return made


def decoded(coder, data, chunk, name="name", layout=LAYOUT):
    into = torch.zeros_like(chunk)
    coder.decode(name, layout, memoryview(data), raw(into), into)
    return into


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        ObjectLayout(((1, 3, 200, 576),), (torch.bfloat16,)),
        ObjectLayout(((3, 200, 576),), (torch.bfloat16,)),
        ObjectLayout(((1, 3, 200, 132),), (torch.uint8,)),  # packed by the engine: kept as it is
    ],
    ids=["heads", "mla", "mla without K/V", "bytes"],
)
def test_exact_tracks_are_exact(layout):
    coder = ObjectCoder(SerdeSettings(track="BF16" if layout.dtypes[0] == torch.bfloat16 else "FP16"))
    chunk = (torch.randn(layout.shapes[0], generator=torch.Generator().manual_seed(1)) * 9).to(layout.dtypes[0])
    data = coded(coder, chunk, layout=layout)
    assert torch.equal(decoded(coder, data, chunk, layout=layout), chunk)
    assert len(data) < chunk.nbytes * 1.01


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_object_that_is_not_finite_is_not_stored_and_that_is_logged_once(profile, caplog, value):
    chunk = chunk_at(512)
    chunk[1, 1, 150, 7] = value
    for settings in (SerdeSettings(track="FP16"), SerdeSettings(profile=profile)):
        caplog.clear()
        coder = ObjectCoder(settings)
        for _ in range(2):
            with pytest.raises(NotFiniteError) as refused:
                coded(coder, chunk, 512)
        assert (refused.value.layer, refused.value.half, refused.value.first) == (1, "values", 512 + 150)
        assert caplog.text.count("is not stored") == 1


def test_layers_fill_the_room_and_more_of_it_is_closer(profile):
    chunk = chunk_at(512)
    errors, sizes = [], []
    for settings in (
        SerdeSettings(profile=profile, share=0.1, fallback="FP4"),
        SerdeSettings(profile=profile),
        SerdeSettings(profile=profile, share=0.5),
    ):
        coder = ObjectCoder(settings)
        data = coded(coder, chunk, 512)
        sizes.append(len(data))
        errors.append(float((decoded(coder, data, chunk).float() - chunk.float()).square().mean()))
    assert sizes == sorted(sizes)
    assert errors[0] >= errors[1] >= errors[2] > 0
    assert errors[2] < errors[0]
    plain = ObjectCoder(SerdeSettings(track="Int4"))
    int4 = decoded(plain, coded(plain, chunk), chunk)
    assert errors[2] < float((int4.float() - chunk.float()).square().mean())


def test_without_a_position_there_is_the_fallback_which_needs_no_profile(profile, caplog):
    chunk = chunk_at(0)
    coder, bare = ObjectCoder(SerdeSettings(profile=profile)), ObjectCoder(SerdeSettings(track="Int4"))
    data = coded(coder, chunk)
    assert torch.equal(decoded(bare, data, chunk), decoded(bare, coded(bare, chunk), chunk))
    assert "coded without layers" in caplog.text
    with pytest.raises(FormatError, match="needs the codec profile"):
        decoded(bare, coded(coder, chunk, 0), chunk)


def test_layers_are_refused_that_were_coded_with_another_profile(profile, tmp_path):
    chunk = chunk_at(0)
    data = coded(ObjectCoder(SerdeSettings(profile=profile)), chunk, 0)
    made = Profile.from_bytes(profile.read_bytes())
    mean = made.transform.mean + 1
    (tmp_path / "other").write_bytes(replace(made, transform=replace(made.transform, mean=mean)).to_bytes())
    with pytest.raises(ForeignError):
        decoded(ObjectCoder(SerdeSettings(profile=tmp_path / "other")), data, chunk)


def test_what_is_damaged_truncated_or_another_object_is_refused(profile):
    chunk = chunk_at(0)
    for settings, position in ((SerdeSettings(track="Int8"), None), (SerdeSettings(profile=profile), 0)):
        coder = ObjectCoder(settings)
        data, dice = coded(coder, chunk, position), random.Random(7)
        with pytest.raises(KvabrError):
            decoded(coder, data, chunk, name="another")
        for size in (0, 10, 24, 500, len(data) // 3):
            with pytest.raises(KvabrError):
                decoded(coder, data[:size], chunk)
        good = decoded(coder, data, chunk)
        for _ in range(60):
            wrong = bytearray(data)
            wrong[dice.randrange(len(wrong))] ^= 1 << dice.randrange(8)
            try:
                assert torch.equal(decoded(coder, wrong, chunk), good)  # it was padding
            except KvabrError:
                continue
        other = ObjectLayout(((2, LAYERS, 128, HEADS * DIM),), (torch.float16,))
        with pytest.raises(KvabrError):
            decoded(coder, data, torch.zeros(other.shapes[0], dtype=torch.float16), layout=other)
    uneven = ObjectLayout(((1, 3, 200, 132),), (torch.uint8,))
    bytes_ = torch.zeros(uneven.shapes[0], dtype=torch.uint8)
    data = coded(ObjectCoder(SerdeSettings()), bytes_, layout=uneven)
    with pytest.raises(FormatError, match="damaged, or belongs to another"):
        decoded(ObjectCoder(SerdeSettings()), data, bytes_, name="another", layout=uneven)
