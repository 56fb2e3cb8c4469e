"""The one part of the build that pyproject.toml cannot say: the native coder, which may fail to build."""

from setuptools import Extension, setup

_ROOM = "kvabr/codec/native"

setup(
    ext_modules=[
        Extension(
            "kvabr.codec.native._kvcoder",
            sources=[
                f"{_ROOM}/{name}.c"
                for name in ("_kvcoder", "tables", "path_portable", "path_avx2", "path_avx512")
            ],
            depends=[f"{_ROOM}/{name}.h" for name in ("kvcoder", "rans", "tile", "synth", "encode")],
            # Fused multiplications and additions would round otherwise than other machines do.
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-strict-aliasing"],
            optional=True,  # without it everything works, slowly
        )
    ]
)
