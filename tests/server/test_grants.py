"""Tokens: who holds one, and what it opens."""

import hashlib
import hmac
import json

import pytest

from kvabr.server import grants as grants_module
from kvabr.server.grants import Grant, Grants, new_token
from kvabr.types.errors import FormatError


def entry(token="one", **changes):  # noqa: S107 - of tests
    made = {"name": token, "token_sha256": hashlib.sha256(token.encode()).hexdigest(), "assets": ["*"], "models": ["*"]}
    return {**made, **changes}


def text(*entries, **changes):
    return json.dumps({"schema": "kvabr.grants/1", "grants": list(entries), **changes})


def test_a_token_opens_its_grant(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(text(entry("one", assets=["team-a/*"]), entry("two", models=["smol*"])))
    grants = Grants.from_file(path)
    assert len(grants) == 2
    assert grants.check(b"one").assets == ("team-a/*",)
    assert grants.check(b"two").models == ("smol*",)
    digest = hashlib.sha256(b"one").hexdigest().encode()
    for token in (None, b"", b"\0", b"One", b"one ", b"on", b"onetwo", b"\xe4" * 1000, b"x" * 4096, digest):
        assert grants.check(token) is None


def test_a_new_token_works_and_is_never_the_same():
    token, made = new_token("team")
    other, _ = new_token()
    assert token != other
    assert len(token) >= 43
    assert token not in json.dumps(made)
    grants = Grants.loads(text(made))
    assert grants.check(token.encode()).name == "team"
    assert grants.check(other.encode()) is None


def test_every_entry_is_compared_whatever_comes(monkeypatch):
    compared = []

    def compare(one, other):
        compared.append(other)
        return hmac.compare_digest(one, other)

    grants = Grants.loads(text(*(entry(f"t{n}") for n in range(20))))

    class Hmac:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(grants_module, "hmac", Hmac)
    counts = []
    for token in (b"t0", b"t19", b"none", None):
        compared.clear()
        grants.check(token)
        counts.append(len(compared))
    assert counts == [20] * 4


def test_patterns_are_of_folder_and_model():
    grant = Grant("g", ("team-a/*", "shared"), ("llama*", "smol?"))
    assert grant.may_read("team-a/x", "llama-3")
    assert grant.may_read("team-a/x/y", "smol2")
    assert grant.may_read("shared", "llama")
    for folder, model in [
        ("team-a", "llama"), ("team-b/x", "llama"), ("shared/x", "llama"), ("team-a/x", "Llama"), ("team-a/x", "smol"),
        ("Team-a/x", "llama"), ("x/team-a/x", "llama"),
    ]:  # fmt: skip
        assert not grant.may_read(folder, model)


def test_a_grant_does_not_show_its_digest():
    grant = next(iter(Grants.loads(text(entry()))))
    assert grant.token_sha256 not in repr(grant)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "got `array`"),
        ("[]", "got `array`"),
        (text(schema="kvabr.grants/2"), "schema"),
        (text(grants={}), "at grants"),
        (text(grants=[entry(f"{n}") for n in range(10_001)]), "<= 10000, at grants"),
        (text("x"), r"at grants\[0\]"),
        (text(entry(), {}), r"`name`.*at grants\[1\]"),
        (text(entry(name="a\nb")), "printable"),
        (text(entry(token_sha256=hashlib.sha256(b"x").hexdigest()[1:])), "--new-token"),
        (text(entry(token_sha256=None)), r"at grants\[0\].token_sha256"),
        (text(entry(token_sha256=hashlib.sha256(b"").hexdigest())), "--new-token"),
        (text(entry(), entry(name="other")), "another grant"),
        (text(entry("a", id="x"), entry("b", id="x")), "another grant already has this ID or token"),
        (text(entry("a"), entry("b", id="a")), "another grant already has this ID or token"),
        (text(entry(id="")), r"at grants\[0\].id"),
        (text(entry(id="x" * 65)), r"at grants\[0\].id"),
        (text(entry(id="a\nb")), "printable"),
        (text(entry(id=7)), r"at grants\[0\].id"),
        (text(entry(), more=1), "unknown field `more`"),
        *(
            (text(entry(expires=value)), r"at grants\[0\].expires")
            for value in ("", "soon", "2027-01-31", "2027-01-31T12:00:00", "9999-99-99T00:00:00Z", -1, 1e300, True, [1])
        ),
        (text(entry("a"), entry("b", name="a")), "another grant"),
        (text(entry(asset=["x"])), "unknown field `asset`"),
        (text({k: v for k, v in entry().items() if k != "assets"}), "missing required field `assets`"),
        (text(entry(assets="*")), r"at grants\[0\].assets"),
        (text(entry(assets=[""])), r"at grants\[0\].assets\[0\]"),
        (text(entry(models=["x" * 1025])), r"<= 1024, at grants\[0\].models"),
        (text(entry(models=["x"] * 1001)), r"<= 1000, at grants\[0\].models"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path, data, words):
    path = tmp_path / "tokens.json"
    path.write_text(data)
    with pytest.raises(FormatError, match=words) as caught:
        Grants.from_file(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2027-01-31T12:00:00Z", 1801396800),
        ("2027-01-31T13:00:00.5+01:00", 1801396800.5),
        (1801396800, 1801396800),
        (0.5, 0.5),
    ],
)
def test_when_a_token_expires(value, seconds):
    (grant,) = Grants.loads(text(entry(expires=value)))
    assert grant.expires_s == seconds
    assert not grant.expired(seconds - 0.25)
    assert grant.expired(seconds)


def test_two_tokens_of_one_holder_have_an_id_each():
    grants = Grants.loads(text(entry("a", name="team", id="team.1"), entry("b", name="team", id="team.2")))
    assert [grants.check(token).id for token in (b"a", b"b")] == ["team.1", "team.2"]
