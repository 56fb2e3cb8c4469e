"""kvabr's native code with the sanitizers of addresses and undefined behaviour, loaded in place of the real one."""

import os
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "kvabr" / "codec" / "native"
BUILT = "KVABR_SANITIZED"
"""Variable with the folder of the modules that `load` puts in place."""
PATHS = ("group", "team", "tables", "path_portable", "path_avx2")
"""Sources of the coder without its Python module."""
ANALYSIS = ("analysis", "analysis_portable", "analysis_avx2")
"""The same of the encoder's transform."""
MODULES = {
    "_kvcoder": ("_kvcoder", "capsules", *PATHS),
    "_kvplace": ("_kvplace",),
    "_kvanalysis": ("_kvanalysis", *ANALYSIS),
}
FLAGS = (
    *("-O1", "-g", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-omit-frame-pointer"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


def build(folder: Path, *, guided: bool) -> Path:
    """Compile the modules into a folder: for libFuzzer's feedback with clang, otherwise with gcc."""
    include = f"-I{sysconfig.get_paths()['include']}"
    compiler = ["clang", "-fsanitize=fuzzer-no-link"] if guided else ["gcc"]
    for name, sources in MODULES.items():
        files = [str(ROOM / f"{each}.c") for each in sources]
        out = ["-fPIC", "-shared", "-pthread", "-o", str(folder / f"{name}.so")]
        subprocess.run([*compiler, *FLAGS, include, *files, *out], check=True)  # noqa: S603
    return folder


def environment(folder: Path, library: str) -> dict[str, str]:
    """Return the environment of a process in which `load` works; ``library`` has the sanitizer."""
    return {
        **os.environ,
        BUILT: str(folder),
        "LD_PRELOAD": library,
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def gcc_library() -> str:
    """Return the path of gcc's address sanitizer."""
    ask = ["gcc", "-print-file-name=libasan.so"]
    found = subprocess.run(ask, check=True, capture_output=True, text=True)  # noqa: S603
    return found.stdout.strip()


def load() -> None:
    """Put the sanitized modules in place of the installed ones, before anything of `kvabr.codec` is imported."""
    folder = os.environ.get(BUILT)
    if folder is None:
        return
    import kvabr.codec.native as room

    for name in MODULES:
        full = f"{room.__name__}.{name}"
        loader = ExtensionFileLoader(full, str(Path(folder, f"{name}.so")))
        spec = spec_from_loader(full, loader)
        if spec is None:
            raise ImportError(full)
        module = module_from_spec(spec)
        loader.exec_module(module)
        sys.modules[full] = module
        setattr(room, name, module)
