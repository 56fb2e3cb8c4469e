"""URLs of object stores."""

from __future__ import annotations

import pytest

from kvabr.store.url import StoreUrl
from kvabr.types.errors import UsageError


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("s3://bucket", ""),
        ("s3://bucket/team/a?endpoint=http://127.0.0.1:8333&region=eu-1", "team/a/"),
        ("gs://bucket/x?anonymous=true", "x/"),
        ("az://container/x?account=me", "x/"),
        ("https://host:8080/x", "x/"),
    ],
)
def test_a_url_is_parsed_and_written_again(url, root):
    parsed = StoreUrl.parse(url)
    assert parsed.root == root
    assert StoreUrl.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s4://bucket", "s3://BUCKET/PREFIX"),
        ("s3://", "name of a bucket"),
        ("s3://b:99999999", "not a URL"),
        ("s3://b!cket/x", "name of a bucket"),
        ("s3://bucket/a/../b", "a prefix has"),
        ("s3://bucket/a//b", "a prefix has"),
        ("s3://bucket/%00", "a prefix has"),
        ("s3://bucket/x#y", "behind a #"),
        ("s3://bucket?region=a&region=b", "twice"),
        ("s3://bucket?regoin=a", "did you mean 'region'"),
        ("s3://bucket?region", "NAME=VALUE"),
        ("s3://bucket?anonymous=yes", "true or false"),
        ("s3://bucket?endpoint=ftp://x", "endpoint"),
        ("s3://bucket?endpoint=http://[1,2]", "endpoint"),
        ("s3://bucket?endpoint=http://x:99999", "endpoint"),
        ("s3://bucket?endpoint=http://:80", "endpoint"),
        (f"s3://bucket?endpoint=http://b{chr(252)}cher.example", "endpoint"),
        (f"http://b{chr(252)}cher.example/caches", "name of a bucket or host"),
        ("s3://bucket?region=eu%0A1", "region has"),
        ("az://bucket?account=a/b", "account has"),
        ("s3://bucket?endpoint=http://u:hidden@x", "endpoint"),
    ],
)
def test_a_wrong_url_is_refused(url, match):
    with pytest.raises(UsageError, match=match):
        StoreUrl.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hidden@bucket/x",
        "s3://bucket/x?secret_access_key=hidden",
        "s3://bucket/x?token=hidden",
        "az://bucket/x?sig=hidden",
        "https://me:hidden@host/x",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID") as caught:
        StoreUrl.parse(url)
    assert "hidden" not in str(caught.value)
