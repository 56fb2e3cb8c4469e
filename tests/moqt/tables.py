"""Table-driven tests: one test case checks every row, and a failure names its row."""

import functools
import inspect
from collections.abc import Callable, Iterable


def table(names: str | tuple[str, ...], rows: Iterable[object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test once per row, within one test case; takes the arguments of `pytest.mark.parametrize`."""
    columns = (names,) if isinstance(names, str) else names
    filled = [(row,) if isinstance(names, str) else tuple(row) for row in rows]
    assert filled, "a table without rows proves nothing"

    def decorate(test):
        @functools.wraps(test)
        def check(*args, **kwargs):
            for row in filled:
                try:
                    test(*args, **kwargs, **dict(zip(columns, row, strict=True)))
                except BaseException as error:
                    error.add_note(f"in the row {row!r}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in columns]
        check.__signature__ = signature.replace(parameters=left)
        return check

    return decorate
