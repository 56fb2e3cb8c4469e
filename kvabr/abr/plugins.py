"""Finds policies and estimators by name, by entry point, or in a file, see `kvabr.types.plugins`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from kvabr.abr.estimators import BUILTIN as ESTIMATORS
from kvabr.abr.estimators import Estimator
from kvabr.abr.policies import BUILTIN as POLICIES
from kvabr.abr.policy import Policy
from kvabr.types.plugins import Registered, find_plugin, load_plugin


def policies() -> Registered[Policy]:
    """Return all policies by name: built-in ones and those of installed packages."""
    return Registered("kvabr.policies", POLICIES)


def estimators() -> Registered[Estimator]:
    """Return all estimators by name: built-in ones and those of installed packages."""
    return Registered("kvabr.estimators", ESTIMATORS)


def load_policy(text: str) -> Callable[[], Policy]:
    """Return a factory of policies; each play needs a new one.

    Args:
        text: ``NAME``, ``fixed:TRACK`` or ``FILE.py:CLASS``; the first and last may end in ``:a=1,b=2``.

    Raises:
        PolicyError: there is no such policy, or its file cannot be loaded; the message names file and line.
    """
    return _policy(text, _folder(text))


@cache
def _policy(text: str, folder: str) -> Callable[[], Policy]:  # noqa: ARG001  # part of the key
    return load_plugin(text, Policy, policies(), "policy", "policies")  # type: ignore[type-abstract]


def load_estimator(text: str) -> Callable[[], Estimator]:
    """Return a factory of estimators; as `load_policy`."""
    return _estimator(text, _folder(text))


@cache
def _estimator(text: str, folder: str) -> Callable[[], Estimator]:  # noqa: ARG001  # part of the key
    return load_plugin(text, Estimator, estimators(), "estimator", "estimators")  # type: ignore[type-abstract]


def _folder(text: str) -> str:
    """Return the folder of a plug-in's file, since the same relative name in another folder is another plug-in."""
    return str(Path.cwd()) if text.partition(":")[0].endswith(".py") else ""


def policy_class(text: str) -> type[Policy]:
    """Return the class of a policy; as `load_policy`."""
    return find_plugin(text, Policy, policies(), "policy", "policies")[0]  # type: ignore[type-abstract]
