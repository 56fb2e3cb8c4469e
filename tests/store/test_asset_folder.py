"""Writing an asset: whole, or nothing remains."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvabr.codec.fit import fit
from kvabr.publish.encoder import publish
from kvabr.store.asset_folder import FolderAsset, FolderAssetStore, FolderAssetWriter, frame_path
from kvabr.store.files import STALE_S, folder_bytes
from kvabr.types.errors import AssetError, UsageError
from tests.assets import whole
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

ROOT = Path(__file__).parents[2]


def left_over(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), SystemExit(3)])
def test_nothing_remains_when_interrupted(tmp_path, error):
    def interrupted():
        with FolderAssetWriter(tmp_path / "asset") as writer:
            writer.frame(0, "FP16", b"x" * 1000)
            assert len(left_over(tmp_path)) == 1
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert left_over(tmp_path) == []


def test_an_asset_is_replaced_only_when_forced(tmp_path):
    path = tmp_path / "asset"
    first = toy_asset(path)
    with pytest.raises(UsageError, match="--force"):
        toy_asset(path)
    second = toy_asset(path, tokens=40, force=True)
    assert (first.catalog.tokens, second.catalog.tokens, FolderAsset.open(path).catalog.tokens) == (70, 40, 40)
    assert left_over(tmp_path) == ["asset"]
    assert not (path / "groups" / "FP16" / "00004.kvg").exists()


def test_a_failed_replacement_leaves_the_old_asset(tmp_path):
    path = tmp_path / "asset"
    toy_asset(path)

    def fails():
        with FolderAssetWriter(path, force=True) as writer:
            writer.frame(0, "FP16", b"new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert FolderAsset.open(path).frame(0, "FP16")
    assert left_over(tmp_path) == ["asset"]


def test_a_damaged_or_newer_asset_may_be_replaced(tmp_path):
    path = tmp_path / "asset"
    toy_asset(path)
    catalog = path / "catalog.json"
    catalog.write_text(catalog.read_text().replace("kvabr.catalog/1", "kvabr.catalog/7"))
    assert toy_asset(path, force=True).catalog.tokens == 70


@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_asset_is_left_alone(tmp_path, force):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "letters.txt").write_text("dear")
    with pytest.raises(AssetError, match="not an asset"):
        FolderAssetWriter(folder, force=force)
    with pytest.raises(AssetError, match="not an asset"):
        FolderAssetWriter(folder / "letters.txt", force=force)
    (folder / "catalog.json").write_text('{"books": 3}')
    with pytest.raises(AssetError, match="not an asset"):
        FolderAssetWriter(folder, force=force)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(AssetError, match="not an asset"):
        FolderAssetWriter(link, force=force)
    assert (folder / "letters.txt").read_text() == "dear"


def test_an_empty_folder_may_become_an_asset(tmp_path):
    (tmp_path / "empty").mkdir()
    assert toy_asset(tmp_path / "empty").catalog.groups == 5
    assert left_over(tmp_path) == ["empty"]


def modes(path):
    """The modes of a folder and all that is in it, by relative path."""
    return {str(found.relative_to(path)): found.stat().st_mode & 0o777 for found in (path, *path.rglob("*"))}


def test_an_asset_is_private_whatever_the_umask(tmp_path):
    mask = os.umask(0)
    try:
        path = toy_asset(tmp_path / "asset").path
    finally:
        os.umask(mask)
    found = modes(path)
    assert {"catalog.json", "prompt.json", "groups/FP16", "groups/FP16/00000.kvg"} <= found.keys()
    assert {mode for name, mode in found.items() if (path / name).is_dir()} == {0o700}
    assert {mode for name, mode in found.items() if not (path / name).is_dir()} == {0o600}


def test_a_group_reads_assets_in_its_folder_but_not_their_prompts(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)
    mask = os.umask(0)
    try:
        path = toy_asset(shared / "asset").path
    finally:
        os.umask(mask)
    found = modes(path)
    assert found.pop("prompt.json") == 0o600
    assert {mode for name, mode in found.items() if (path / name).is_dir()} == {0o750}
    assert {mode for name, mode in found.items() if not (path / name).is_dir()} == {0o640}


KILLED = """
import os, signal, sys
from pathlib import Path
from kvabr.store.asset_folder import FolderAssetWriter
with FolderAssetWriter(Path(sys.argv[1])) as writer:
    writer.frame(0, "FP16", b"x" * 1000)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print("writing", flush=True)
    sys.stdin.read()
"""


def half_written(path, how):
    """A process that writes an asset, and is killed meanwhile or waits."""
    argv = [sys.executable, "-c", KILLED, str(path), how]
    return subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603


def age(folder, seconds=2 * STALE_S):
    """Make a folder and all in it older."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - seconds,) * 2)


@pytest.mark.process
def test_what_a_killed_publisher_leaves_is_swept_and_what_a_living_one_writes_is_not(tmp_path):
    killed = [half_written(tmp_path / f"dead-{number}", "killed") for number in range(2)]
    for process in killed:
        process.wait(300)
        process.communicate()
    living = half_written(tmp_path / "alive", "waits")
    assert living.stdout.readline() == b"writing\n"
    try:
        old, young, alive = left_over(tmp_path)[1:] + left_over(tmp_path)[:1]
        assert (young[:7], alive[:7]) == (".dead-1", ".alive.")
        (tmp_path / ".mine.partial").mkdir()
        (tmp_path / "dead.partial").mkdir()
        for name in (old, young, alive, "dead.partial"):
            age(tmp_path / name)
        os.utime(tmp_path / young / "groups" / "FP16" / "00000.kvg")  # now, unlike the rest of it
        with FolderAssetWriter(tmp_path / "next"):
            pass
        assert left_over(tmp_path) == sorted([young, alive, ".mine.partial", "dead.partial"])
        age(tmp_path / young)
        with FolderAssetWriter(tmp_path / "next"):
            pass
        assert left_over(tmp_path) == sorted([alive, ".mine.partial", "dead.partial"])
    finally:
        living.kill()
        living.communicate()


def test_hard_links_are_not_served_as_frames(tmp_path):
    """They may be other names of files that only the server may read."""
    secret = tmp_path / "secret"
    path = toy_asset(tmp_path / "root" / "asset").path
    frame = frame_path(path, 0, "FP16")
    secret.write_bytes(frame.read_bytes())
    asset = FolderAssetStore(tmp_path / "root").open("asset")
    asset.check_parts()
    frame.unlink()
    frame.hardlink_to(secret)
    with pytest.raises(AssetError, match="hard link"):
        asset.check_parts()
    with pytest.raises(AssetError, match="cannot be read"):
        asset.open_frame(0, "FP16")
    secret.unlink()
    asset.check_parts()
    assert whole(asset.open_frame(0, "FP16")) == frame.read_bytes()
    (path / "catalog.json").rename(secret)
    (path / "catalog.json").hardlink_to(secret)
    with pytest.raises(AssetError, match="a hard link"):
        FolderAssetStore(tmp_path / "root").open("asset")
    assert FolderAsset.open(path).catalog.tokens == 70  # the user's own


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match="cannot be made"), FolderAssetWriter(tmp_path / "file" / "asset"):
        pass


ENCODE = """
import sys
from pathlib import Path
from kvabr.types.errors import AssetError
from tests.toymodel import toy_asset
try:
    toy_asset(Path(sys.argv[1]))
except AssetError as error:
    print(error)
    sys.exit(7)
"""


def encode(path, *prefix, limit=None):
    """Encode in a process of its own, which may run out of space without taking the tests along."""

    def restrict():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(  # noqa: S603 - our own interpreter
        [*prefix, sys.executable, "-c", ENCODE, str(path)],
        cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=restrict if limit else None,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.process
def test_a_file_size_limit_leaves_no_half_asset(tmp_path):
    """Python ignores SIGXFSZ, so a write beyond the limit fails as it would on a full disk."""
    done = encode(tmp_path / "asset", limit=8000)
    assert done.returncode == 7, done.stderr
    assert "no space left while writing groups/FP16/00000.kvg" in done.stdout
    assert left_over(tmp_path) == []


@pytest.mark.process
def test_a_full_disk_leaves_no_half_asset(tmp_path):
    """A real one: a file system of 64 kB that the asset does not fit into."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=64k none {disk} && "$@"; status=$?; ls -A {disk} | sed s/^/left:/; exit $status'
    confined = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    probe = subprocess.run([*confined, "true"], capture_output=True, check=False)  # noqa: S603
    if probe.returncode:
        pytest.skip("this machine lets no one mount a small disk; the test above stands in for it")
    done = encode(disk / "asset", *confined)
    assert done.returncode == 7, done.stderr
    assert "no space left while writing" in done.stdout
    assert "nothing of the asset was kept" in done.stdout
    assert "left:" not in done.stdout


def test_assets_of_one_store_keep_their_profile_once(tmp_path):
    profile = fit(SPEC, lambda: iter([ToyModel().prefill(prompt(200).tokens)]))
    store, data = FolderAssetStore(tmp_path), profile.to_bytes()
    for name, tokens in (("one", 70), ("two", 40)):
        with store.writer(name) as writer:
            writer.commit(publish(ToyModel(), prompt(tokens), ("FP16", "AC-5x"), profile, writer))
    paths = [tmp_path / name / "profile.safetensors" for name in ("one", "two")]
    assert len({path.stat().st_ino for path in paths}) == 1
    assert sum(map(folder_bytes, (tmp_path / "one", tmp_path / "two", tmp_path / ".profiles"))) == pytest.approx(
        folder_bytes(tmp_path), abs=3
    )
    assert [store.open(name).profile_bytes() for name in store.list().versions] == [data, data]
    for name in ("one", "two"):
        store.open(name).check_parts()
    # A damaged shared copy is replaced, and what was published with the sound one stays as it is.
    (shared,) = (tmp_path / ".profiles").iterdir()
    shared.unlink()
    shared.write_bytes(b"x" * len(data))
    with store.writer("three") as writer:
        writer.commit(publish(ToyModel(), prompt(50), ("FP16", "AC-5x"), profile, writer))
    assert [store.open(name).profile_bytes() for name in ("one", "two", "three")] == [data] * 3


def test_an_asset_of_its_own_has_its_own_profile(tmp_path):
    profile = fit(SPEC, lambda: iter([ToyModel().prefill(prompt(200).tokens)]))
    with FolderAssetStore(tmp_path / "made").writer(".") as writer:
        writer.commit(publish(ToyModel(), prompt(70), ("FP16", "AC-5x"), profile, writer))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
