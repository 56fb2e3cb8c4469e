"""A device that is not the processor, for machines without one: its tensors meet others only by a copy that says so.

What is computed is real, on the processor's memory; what differs is what torch allows, and how many bytes cross.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = torch.device("cuda", 0)
moved: dict[str, int] = {"there": 0, "back": 0}
"""Bytes that were copied to the device and from it."""


class Elsewhere(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        made.inner = inner
        return made

    @property
    def device(self):
        return NAME

    def __repr__(self, **_):
        return f"Elsewhere({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name == "_to_copy":
            return _to_copy(args[0], kwargs)
        if name == "copy_":
            into, other = args[0], args[1]
            if type(into) is not type(other):
                count("there" if isinstance(into, cls) else "back", other)
            func(bare(into), bare(other))
            return into
        if name == "_local_scalar_dense":
            count("back", args[0])
            return func(args[0].inner)
        for each in tree_leaves((args, kwargs)):
            if type(each) is torch.Tensor and each.dim():
                raise RuntimeError(f"{name}: tensors on two devices")
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        result = func(*tree_map(bare, args), **tree_map(bare, kwargs))
        if name.endswith("_") and not name.endswith("__"):
            return args[0]
        return tree_map(lambda each: cls(each) if isinstance(each, torch.Tensor) else each, result)


def bare(value):
    return value.inner if isinstance(value, Elsewhere) else value


def count(way, tensor):
    moved[way] += tensor.numel() * tensor.element_size()


def _to_copy(tensor, kwargs):
    target = kwargs.pop("device", None) or tensor.device
    was = isinstance(tensor, Elsewhere)
    made = torch.ops.aten._to_copy.default(bare(tensor), **kwargs)
    if target.type == "cpu":
        if was:
            count("back", made)
        return made
    if not was:
        count("there", tensor)
    return Elsewhere(made)


class Reachable(TorchFunctionMode):
    """While this is entered, tensors can be moved to the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        target = kwargs.get("device", args[1] if len(args) > 1 else None)
        if func is torch.Tensor.to and target == NAME and not isinstance(args[0], Elsewhere):
            moved = _to_copy(args[0], {"device": NAME})
            return moved.to(*args[2:]) if len(args) > 2 else moved
        return func(*args, **kwargs)
