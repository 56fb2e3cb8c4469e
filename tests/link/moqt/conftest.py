"""The assets of the client tests."""

from tests.client.conftest import libraries, long, origin, root, short  # noqa: F401  # fixtures
