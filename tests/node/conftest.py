"""The assets of the client's tests, and a fetcher on whatever loop a test runs."""

from __future__ import annotations

from tests.client.conftest import libraries, long, origin, root, short  # noqa: F401  # fixtures
