"""What pyproject.toml cannot say: native code, which may fail to build, the traces as a package, a README for PyPI."""

import re
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

_ROOM = "kvabr/codec/native"

# Fused multiplications and additions that nobody asked for would round otherwise than other machines do.
_FLAGS = ["-O3", "-ffp-contract=off", "-fno-strict-aliasing"]

# The limited API: a wheel that any CPython from 3.11 on loads. Builds without the GIL have none.
_LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
_API = {"py_limited_api": True, "define_macros": [("Py_LIMITED_API", "0x030B0000")]} if _LIMITED else {}

_REPOSITORY = "https://github.com/kvabr/kvabr/raw/main/"  # pages and pictures alike


def _readme() -> str:
    """Return the README with absolute links: relative ones lead nowhere on PyPI."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?://|#)", f"]({_REPOSITORY}", text)


setup(
    long_description=_readme(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["kvabr*"]), "kvabr.data.traces"],
    package_dir={"kvabr.data.traces": "traces"},
    ext_modules=[
        Extension(
            "kvabr.codec.native._kvcoder",
            sources=[
                f"{_ROOM}/{name}.c"
                for name in (
                    *("_kvcoder", "capsules", "group", "team", "tables"),
                    *("path_portable", "path_avx2"),
                )
            ],
            depends=[
                f"{_ROOM}/{name}.h"
                for name in (
                    *("kvcoder", "module", "rans", "tile", "synth"),
                    *("near", "near_avx2", "encode", "encode_avx2", "alike", "count"),
                )
            ],
            extra_compile_args=_FLAGS,
            **_API,
            optional=True,  # without it AC tracks are an error
        ),
        Extension(
            "kvabr.codec.native._kvanalysis",
            sources=[f"{_ROOM}/{name}.c" for name in ("_kvanalysis", "analysis", "analysis_portable", "analysis_avx2")],
            depends=[f"{_ROOM}/{name}.h" for name in ("kvcoder", "analysis", "analysis_tile")],
            extra_compile_args=_FLAGS,
            **_API,
            optional=True,  # as the coder
        ),
        Extension(
            "kvabr.codec.native._kvplace",
            sources=[f"{_ROOM}/_kvplace.c"],
            depends=[f"{_ROOM}/{name}.h" for name in ("placing", "place")],
            extra_compile_args=_FLAGS,
            **_API,
            optional=True,  # without it torch does the same
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if _LIMITED else {},
)
