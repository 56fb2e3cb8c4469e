"""Authorization tokens and their aliases (draft 18, section 10.2.2)."""

import pytest

from kvabr.moqt.codes import SessionCode, SessionFault
from kvabr.moqt.parameters import DELETE, REGISTER, USE_ALIAS, Token, token_values
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


def test_setup_never_overflows():
    """Section 10.3.1.4: a token that does not fit is used, not registered."""
    assert token_values((register(1, b"four"), register(2, b"x")), setup=True) == (b"four", b"x")


@table(
    ("tokens", "setup", "code"),
    [
        ((use(3),), False, SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS),
        ((Token(b"a"), delete(3)), False, SessionCode.UNKNOWN_AUTH_TOKEN_ALIAS),
        ((register(1, b""),), False, SessionCode.AUTH_TOKEN_CACHE_OVERFLOW),  # 0, the default, prohibits aliases
        ((register(1, b"x"), use(1)), True, SessionCode.PROTOCOL_VIOLATION),
        ((register(1, b"x"), delete(1)), True, SessionCode.PROTOCOL_VIOLATION),
    ],
)
def test_faults(tokens, setup, code):
    with pytest.raises(SessionFault) as caught:
        token_values(tokens, setup=setup)
    assert caught.value.code == code
