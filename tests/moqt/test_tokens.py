"""Authorization tokens and their aliases (draft 18, section 10.2.2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.parameters import DELETE, REGISTER, USE_ALIAS, USE_VALUE, Token, TokenCache
from kvabr.moqt.wire import DRAFTS, NARROW, WIDE
from tests.moqt import strategies
from tests.moqt.tables import table


def register(alias: int, value: bytes) -> Token:
    return Token(value, REGISTER, alias)


def use(alias: int) -> Token:
    return Token(b"", USE_ALIAS, alias)


def delete(alias: int) -> Token:
    return Token(b"", DELETE, alias)


@table(
    ("data", "token"),
    [  # alias type; alias, type and value where it has them
        ("00 80c8", delete(200)),
        ("01 05 02 616263", Token(b"abc", REGISTER, 5, 2)),
        ("02 05", use(5)),
        ("03 00 616263", Token(b"abc")),
        ("03 00", Token(b"")),
    ],
)
def test_structure(data, token):
    assert Token.decode(bytes.fromhex(data), WIDE) == token
    assert token.encode(WIDE) == bytes.fromhex(data)
    narrow = data.replace("80c8", "40c8")
    assert Token.decode(bytes.fromhex(narrow), NARROW) == token
    assert token.encode(NARROW) == bytes.fromhex(narrow)


@table("data", ["", "04", "00", "01", "0105", "02", "03", "000500", "020500", "0280"])
def test_no_token(data):
    """What cannot be decoded closes the session with KEY_VALUE_FORMATTING_ERROR."""
    for varint in (WIDE, NARROW):
        with pytest.raises(SessionFault) as caught:
            Token.decode(bytes.fromhex(data), varint)
        assert caught.value.code == SessionCode.KEY_VALUE_FORMATTING_ERROR


@pytest.mark.parametrize("draft", DRAFTS)
def test_come_back(draft):
    @given(strategies.tokens(draft))
    def check(token):
        assert Token.decode(token.encode(draft.varint), draft.varint) == token

    check()


def test_values_are_used_as_they_are():
    assert TokenCache().resolve((Token(b"a"), Token(b"b", USE_VALUE))) == (b"a", b"b")


def test_register_use_delete():
    cache = TokenCache(1000)
    assert cache.resolve((register(1, b"one"),)) == (b"one",)
    assert cache.resolve((use(1),)) == (b"one",)
    assert cache.resolve((register(2, b"two"), use(2), use(1))) == (b"two", b"two", b"one")
    assert cache.resolve((delete(1),)) == ()
    assert cache.resolve((register(1, b"new"), use(1))) == (b"new", b"new")


def fault(cache: TokenCache, *tokens: Token, setup: bool = False) -> SessionCode:
    with pytest.raises(SessionFault) as caught:
        cache.resolve(tokens, setup=setup)
    return caught.value.code


def test_an_alias_that_is_registered_already():
    cache = TokenCache(1000)
    assert fault(cache, register(1, b"one"), register(1, b"one")) == SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS


@table("token", [use(3), delete(3)])
def test_an_alias_that_is_not_registered(token):
    cache = TokenCache(1000)
    assert fault(cache, token) == SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS
    cache.resolve((register(3, b""), delete(3)))
    assert fault(cache, token) == SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS


def test_size_is_16_bytes_and_the_value():
    """Section 10.3.1.3: what is deleted no longer counts."""
    cache = TokenCache(16 + 10 + 16)
    cache.resolve((register(1, b"0123456789"), register(2, b"")))
    assert fault(cache, register(3, b"")) == SessionCode.AUTH_TOKEN_CACHE_OVERFLOW
    cache.resolve((delete(1), register(3, b"0123456789")))
    assert fault(cache, register(4, b"")) == SessionCode.AUTH_TOKEN_CACHE_OVERFLOW


def test_without_a_cache_there_are_no_aliases():
    """Section 10.3.1.3: 0, the default, prohibits them."""
    assert fault(TokenCache(), register(1, b"")) == SessionCode.AUTH_TOKEN_CACHE_OVERFLOW


def test_setup_never_overflows():
    """Section 10.3.1.4: a token that does not fit is used, not registered."""
    cache = TokenCache(20)
    assert cache.resolve((register(1, b"four"), register(2, b"x")), setup=True) == (b"four", b"x")
    assert cache.resolve((use(1),)) == (b"four",)
    assert fault(cache, use(2)) == SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS


@table("token", [use(1), delete(1)])
def test_setup_refers_to_no_alias(token):
    """Section 10.2.2."""
    cache = TokenCache(1000)
    assert fault(cache, register(1, b"x"), token, setup=True) == SessionCode.PROTOCOL_VIOLATION


@given(st.lists(st.tuples(st.sampled_from([REGISTER, USE_ALIAS, DELETE]), st.integers(0, 5), st.binary(max_size=20))))
def test_against_a_dictionary(actions):
    limit = 100
    cache, known = TokenCache(limit), {}
    for kind, alias, value in actions:
        token = Token(value if kind == REGISTER else b"", kind, alias)
        size = sum(16 + len(one) for one in known.values())
        wrong = alias in known or size + 16 + len(value) > limit if kind == REGISTER else alias not in known
        if wrong:
            with pytest.raises(SessionFault):
                cache.resolve((token,))
            continue
        found = cache.resolve((token,))
        if kind == REGISTER:
            known[alias] = value
        assert found == (() if kind == DELETE else (known[alias],))
        if kind == DELETE:
            del known[alias]
