"""Authorization tokens and their aliases (draft 18, section 10.2.2)."""

import pytest
from hypothesis import given

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.parameters import DELETE, REGISTER, USE_ALIAS, USE_VALUE, Token, token_values
from kvabr.moqt.wire import DRAFTS
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
    assert Token.decode(bytes.fromhex(data)) == token
    assert token.encode() == bytes.fromhex(data)


@table("data", ["", "04", "00", "01", "0105", "02", "03", "000500", "020500", "0280"])
def test_no_token(data):
    """What cannot be decoded closes the session with KEY_VALUE_FORMATTING_ERROR."""
    with pytest.raises(SessionFault) as caught:
        Token.decode(bytes.fromhex(data))
    assert caught.value.code == SessionCode.KEY_VALUE_FORMATTING_ERROR


@pytest.mark.parametrize("draft", DRAFTS)
def test_come_back(draft):
    @given(strategies.tokens())
    def check(token):
        assert Token.decode(token.encode()) == token

    check()


def test_values_are_used_as_they_are():
    assert token_values((Token(b"a"), Token(b"b", USE_VALUE))) == (b"a", b"b")


def fault(*tokens: Token, setup: bool = False) -> SessionCode:
    with pytest.raises(SessionFault) as caught:
        token_values(tokens, setup=setup)
    return caught.value.code


@table("token", [use(3), delete(3)])
def test_an_alias_is_never_registered(token):
    assert fault(token) == SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS
    assert fault(Token(b"a"), token) == SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS


def test_without_a_cache_there_are_no_aliases():
    """Section 10.3.1.3: 0, the default, prohibits them."""
    assert fault(register(1, b"")) == SessionCode.AUTH_TOKEN_CACHE_OVERFLOW


def test_setup_never_overflows():
    """Section 10.3.1.4: a token that does not fit is used, not registered."""
    assert token_values((register(1, b"four"), register(2, b"x")), setup=True) == (b"four", b"x")


@table("token", [use(1), delete(1)])
def test_setup_refers_to_no_alias(token):
    """Section 10.2.2."""
    assert fault(register(1, b"x"), token, setup=True) == SessionCode.PROTOCOL_VIOLATION
