"""The public API: what `kvabr` exports, and what importing it loads."""

import inspect

import pytest

import kvabr

NAMES = {
    "AssetError", "AsyncClient", "BusyError", "Catalog", "Client", "ConnectionLostError", "Decision", "Engine",
    "Estimator", "Exact", "ExhaustedError", "ForbiddenError", "ForeignError", "ForkedError", "FormatError", "Found",
    "Handle", "Hinted", "HoleError", "IncompleteError", "KVSpec", "KvabrError", "Limits", "MediaTokens", "Medium",
    "MissingAssetError", "MissingTraceError", "ModelError", "NoAnswerError", "NotFiniteError", "NotFoundError",
    "NothingCached", "Passage", "PeerOptions", "PlayError", "PlayOptions", "Played", "PlayedPrefix", "Policy",
    "PolicyError", "PrefillCost",
    "RequestError", "Snapshot", "StoreError", "StepGate", "TraceError", "TraceQuestionError", "TrackNamespace",
    "TransportError", "UnauthorizedError", "UnknownPolicyError", "Upgrades", "UsageError", "VersionError", "View",
    "__version__", "save",
}  # fmt: skip
CLIENT = {
    "begin", "close", "connect", "find", "find_asset", "hint_asset", "measure_prefill", "metrics", "models",
    "options", "peer", "play", "play_asset",
}  # fmt: skip


def test_the_exported_names():
    assert set(kvabr.__all__) == NAMES
    assert set(dir(kvabr)) == NAMES
    for name in NAMES:
        assert getattr(kvabr, name).__doc__ or name == "__version__"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvabr.nonsense


def test_every_error_is_exported():
    from kvabr.types import errors

    found = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert found <= NAMES


def test_the_two_clients_take_the_same_arguments():
    public = {name for name, _ in inspect.getmembers(kvabr.Client) if name[0] != "_"}
    assert public == CLIENT | {"submit"}
    for name in CLIENT - {"begin", "metrics", "options"}:
        one, other = getattr(kvabr.Client, name), getattr(kvabr.AsyncClient, name)
        assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters), name
    both = (inspect.signature(kvabr.Client), inspect.signature(kvabr.AsyncClient))
    assert list(both[0].parameters) == list(both[1].parameters)


def test_nothing_public_takes_options_of_any_kind():
    for client in (kvabr.Client, kvabr.AsyncClient):
        for name, method in inspect.getmembers(client, inspect.isfunction):
            if name[0] != "_" or name == "__init__":
                kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
                assert inspect.Parameter.VAR_KEYWORD not in kinds, name
