"""Run the kernels in Triton's interpreter where there is no GPU, without affecting the rest of the suite."""

import functools
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from kvabr.codec.gpu import batches

INTERPRET = "TRITON_INTERPRET"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if find_spec("triton") is not None and DEVICE.type == "cpu":
    # Triton reads the environment while loading, and again when kernels run.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERPRET, "1")
        import kvabr.codec.gpu.analysis_kernels
        import kvabr.codec.gpu.kernels
        import kvabr.codec.gpu.level_kernels
        import kvabr.codec.gpu.writer_kernels  # noqa: F401


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the interpreter what it does again for every operation, and for every function that a kernel calls."""
    from triton.language import dtype
    from triton.runtime import interpreter

    translate, patch_lang = interpreter._get_np_dtype, interpreter._patch_lang
    known = functools.cache(translate)
    patched: set[str] = set()
    """Packages of the kernel that runs, and of the functions that it has called."""

    def once(fn):
        kernel, own = not patched, fn.__module__.partition(".")[0]  # a package sees Triton's language by one name
        if own in patched:
            return interpreter._LangPatchScope()
        patched.add(own)
        scope = patch_lang(fn)
        if kernel:
            restore = scope.restore
            scope.restore = lambda: (restore(), patched.clear())
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", once)
    monkeypatch.setattr(
        interpreter, "_get_np_dtype", lambda of: known(of.scalar) if type(of.scalar) is dtype else translate(of)
    )


def on_device(device: torch.device) -> bool:
    """Stand in for `gpu.runs_on`: kernels run where these tests do."""
    return device.type == DEVICE.type


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    """Interpret, if there is nothing to compile for; the processor must not step in for the kernels."""
    if DEVICE.type == "cpu":
        monkeypatch.setenv(INTERPRET, "1")
        hasten(monkeypatch)
    batches._warn.cache_clear()  # or only the first test would notice
    yield
    assert not [str(each.message) for each in recwarn if "on the processor" in str(each.message)]


def memory(tensor):
    """Return the first address of a contiguous tensor, and the one behind it."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


@pytest.fixture
def guarded(monkeypatch):
    """Check every address that a kernel uses against its buffers."""
    if DEVICE.type != "cpu":
        pytest.skip("addresses can be watched in Triton's interpreter only: CUDA_VISIBLE_DEVICES= tools/test")
    from triton.runtime.interpreter import InterpreterBuilder

    from kvabr.codec.gpu import analysis_kernels, kernels, writer_kernels

    given, own, touched = [], [], [0]

    def watch(kernel):
        run = kernel.run

        def watched(*args, **kwargs):
            given[:] = own + [memory(arg) for arg in args if isinstance(arg, torch.Tensor)]
            return run(*args, **kwargs)

        monkeypatch.setattr(kernel, "run", watched)

    for name in ("read_rows", "prepare", "unstack", "finish"):
        watch(getattr(kernels, name))
    for name in ("centre", "powers", "to_words", "product"):
        watch(getattr(analysis_kernels, name))
    for name in ("quantise", "write_rows", "collect"):
        watch(getattr(writer_kernels, name))

    def check(pointers, mask):
        at = np.asarray(pointers.data)[np.asarray(mask.data, dtype=bool)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        good = np.zeros(at.shape, dtype=bool)
        for first, last in given:
            good |= (at >= first) & (at + size <= last)
        touched[0] += at.size
        assert good.all(), "a kernel would have left its memory"

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def checked_load(self, pointers, mask, *rest):
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", checked_store)

    def run(out, work):
        """Do some work whose kernels may write to a tensor."""
        own[:] = [memory(out)]
        before = touched[0]
        work()
        assert touched[0] > before

    return run
