"""Plays through real servers: SeaweedFS over S3, and nginx as a cache in front of objects."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from kvabr.client.async_client import AsyncClient
from kvabr.client.origins import dialling
from kvabr.store.asset_folder import FolderAsset
from kvabr.store.objects.bucket import Bucket
from kvabr.types.errors import StoreError, TransportError, UnauthorizedError
from tests.client.served import LIMIT_S
from tests.client.stored import put_asset
from tests.client.test_play import close
from tests.toymodel import SPEC, prompt

LONG, SHORT = prompt(160).tokens, prompt(70).tokens
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIG = """
daemon off; worker_processes 1; pid {at}/pid; error_log {at}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {at}/body; proxy_temp_path {at}/temp; fastcgi_temp_path {at}/fastcgi;
    uwsgi_temp_path {at}/uwsgi; scgi_temp_path {at}/scgi;
    proxy_cache_path {at}/cache keys_zone=kv:1m max_size=64m inactive=1d;
    log_format asked "$request_uri $http_range $status";
    server {{ listen 127.0.0.1:{origin}; root {root}; access_log {at}/origin.log asked; }}
    server {{
        listen 127.0.0.1:{cache};
        location / {{
            slice 16k;
            proxy_pass http://127.0.0.1:{origin};
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Range $slice_range;
            proxy_cache kv;
            proxy_cache_key $uri$slice_range;
            proxy_cache_valid 200 206 1d;
            proxy_cache_lock on;
        }}
    }}
}}
"""


@pytest.fixture
def store(seaweed, root):
    """URL of a store in SeaweedFS with the two assets of the toy model."""
    url = seaweed.url()
    for name in ("short", "long"):
        put_asset(url, FolderAsset.open(root / name))
    return url


@pytest.fixture
def as_reader(seaweed, store, monkeypatch):
    """From here on, one who may only GET."""
    del store
    for name, value in seaweed.environment("reader").items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("as_reader")
async def test_who_may_only_get_plays_by_prompt_and_by_name(store, short):
    async with AsyncClient(store) as client:
        for tokens in (LONG, SHORT, (*SHORT[:64], 1, 2, 3)):
            played = await client.play(tokens, deadline=LIMIT_S, model=SPEC)
            assert played.tokens >= 64
            assert close(played.kv, LONG[: played.tokens])
        played = await client.play_asset(short.namespace, deadline=LIMIT_S)
        assert close(played.kv, SHORT)
        assert await client.find([5] * 90, model=SPEC) is None


async def test_wrong_credentials_are_an_error_that_says_where_they_come_from(store, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    async with AsyncClient(store) as client:
        with pytest.raises(UnauthorizedError, match="AWS_ACCESS_KEY_ID") as caught:
            await client.connect()
    assert "wrong" not in str(caught.value)


async def test_a_bucket_that_does_not_exist_is_an_error(seaweed):
    async with AsyncClient(seaweed.url(bucket="no-such-bucket")) as client:
        with pytest.raises(TransportError) as caught:
            await client.connect()
    assert isinstance(caught.value, StoreError | UnauthorizedError)


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_no_descriptor_is_left_open(store):
    async with AsyncClient(store) as client:
        await client.play(LONG, deadline=LIMIT_S, model=SPEC)
        before = descriptors()
        for _ in range(5):
            await client.play(LONG, deadline=LIMIT_S, model=SPEC)
        async with dialling(store) as connection:
            assert await connection.answers(LIMIT_S)
        assert descriptors() <= before + 16  # connections that are kept for the next request


@pytest.fixture
def nginx(tmp_path, root):
    """URL of nginx in front of a folder of objects, and what its origin is asked for."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    objects, at = tmp_path / "objects", tmp_path / "nginx"
    at.mkdir()
    put_asset(f"file://{objects}?layout=objects", FolderAsset.open(root / "long"))
    for path in (tmp_path, *objects.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    ports = {}
    for name in ("origin", "cache"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports[name] = free.getsockname()[1]
    user = "user root;" if os.getuid() == 0 else ""
    (at / "nginx.conf").write_text(user + CONFIG.format(at=at, root=objects, **ports))
    process = subprocess.Popen(  # noqa: S603 - ours
        [NGINX, "-p", at, "-c", at / "nginx.conf", "-e", at / "error.log"]
    )
    try:
        wait_for(ports["cache"], process, at / "error.log")
        yield f"http://127.0.0.1:{ports['cache']}", at / "origin.log"
    finally:
        process.terminate()
        process.wait(60)


def wait_for(port, process, log: Path):
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("nginx does not listen")


@pytest.mark.process
async def test_a_cache_of_slices_in_front_serves_the_same_play_twice(nginx):
    url, log = nginx
    spans = re.compile(r"^/v1/default/s/\S+ (bytes=\S+) 206$", re.MULTILINE)
    asked = []
    for _ in range(2):
        async with AsyncClient(url) as client:
            played = await client.play(LONG, deadline=LIMIT_S, model=SPEC)
            assert close(played.kv, LONG)
            connection = await client.connect()
            track = played.catalog.by_name["FP16"]
            for group, size in enumerate(track.bytes):  # whatever a play takes of it, now all of a track has come
                download = connection.fetch(played.catalog.namespace, "FP16", group, limit=size, exact=True)
                while await download.read():
                    pass
                assert download.has_digest(track.digests[group])
        asked.append(spans.findall(log.read_text()))
    # The second time the cache had every slice of the span; the origin was asked for no byte twice.
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == len(asked[0]) > 0


async def test_a_cache_that_is_read_is_not_written(tmp_path):
    del tmp_path
    bucket = Bucket.open("http://127.0.0.1:1")
    with pytest.raises(Exception, match="can only be read"):
        await bucket.put("s/x", b"")
