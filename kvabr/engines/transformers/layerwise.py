"""A transformers model that reads its decoder layers from disk one at a time, to calibrate large models.

Memory holds the embedding, the head and one layer. Every layer is read once: all contexts go through a layer before the
next layer is read. Gradients with respect to the cache are computed in the same way, from the last layer to the first:
a temporary file has each layer's input at the scored tokens, and the layer's output is computed again.

Each layer must have keys and values, and depend only on the previous layer's output and shared inputs (masks,
rotations), as in Llama, Mistral, Qwen, SmolLM, Gemma 3, OLMo and others.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from kvabr.codec.payload import raw
from kvabr.engines.adapters import require
from kvabr.engines.transformers.cache import new_cache
from kvabr.engines.transformers.engine import TransformersEngine, sample_next
from kvabr.engines.transformers.weight_files import WeightFiles
from kvabr.publish.model import LayerSink
from kvabr.types.errors import ModelError
from kvabr.types.kv import KVSpec

_OUTER = "embed_tokens", "layers", "norm", "rotary_emb"
_CACHE = object()


class DiskLayers:
    """The decoder layers of a model; all but the running layer are on the meta device."""

    def __init__(self, model: Any, weights: WeightFiles, device: torch.device, dtype: torch.dtype) -> None:
        """Wrap a model on the meta device, so that its layers read their weights when called.

        Raise `ModelError` for an unsupported class, or weights that do not fit it.
        """
        self._name = type(model).__name__
        body = model.base_model
        own = [name for name, _ in body.named_children()]
        if "layers" not in own or (others := [name for name in own if name not in _OUTER]):
            what = ", ".join(others) if "layers" in own else "no list of layers"
            raise self._refused(f"its body has {what}")
        self._model, self._weights, self._device, self._dtype = model, weights, device, dtype
        self.layers: list[Any] = list(body.layers)
        self._forwards: list[Callable[..., Any]] = [layer.forward for layer in self.layers]
        self._held: int | None = None
        inside = next(name for name, module in model.named_modules() if module is body.layers)
        self._prefixes = [f"{inside}.{index}." for index in range(len(self.layers))]
        self._fill_buffers()
        self._read_outer(inside)
        for index, layer in enumerate(self.layers):
            layer.forward = self._reading(index)

    def _refused(self, why: str) -> ModelError:
        return ModelError(f"a {self._name} cannot be run layer by layer: {why}; use --load whole")

    def _fill_buffers(self) -> None:
        for name, module in self._model.named_modules():
            unmade = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
            for key in unmade:
                value = torch.empty_like(module.get_buffer(key), device=self._device)
                setattr(module, key, value.fill_(float("nan")) if value.is_floating_point() else value.zero_())
            if unmade:
                with torch.no_grad():
                    self._model._init_weights(module)  # noqa: SLF001 - from_pretrained does so, too
            if any(not bool(torch.isfinite(module.get_buffer(key)).all()) for key in unmade):
                raise self._refused(f"its {name} has a buffer that kvabr cannot compute")

    def _read_outer(self, inside: str) -> None:
        outer = {
            name: tuple(each.shape)
            for name, each in self._model.named_parameters()
            if not name.startswith(f"{inside}.") and name in self._weights
        }
        read = self._weights.read(outer, self._device, self._dtype)
        self._model.load_state_dict(read, strict=False, assign=True)
        self._model.tie_weights()
        for name, each in self._model.named_parameters():
            if each.is_meta and not name.startswith(f"{inside}."):
                self._weights.read({name: tuple(each.shape)}, self._device, self._dtype)  # raises: it is missing
        self._model.requires_grad_(False)

    def _reading(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.held(index):
                return self._forwards[index](*args, **kwargs)

        return forward

    @contextmanager
    def held(self, index: int) -> Iterator[None]:
        """Keep one layer's weights in memory inside the context."""
        if self._held == index:
            yield
            return
        layer, prefix = self.layers[index], self._prefixes[index]
        empty = dict(layer.named_parameters())
        wanted = {prefix + name: tuple(each.shape) for name, each in empty.items()}
        read = self._weights.read(wanted, self._device, self._dtype)
        layer.load_state_dict({name.removeprefix(prefix): each for name, each in read.items()}, assign=True)
        layer.requires_grad_(False)
        del read
        self._held = index
        try:
            yield
        finally:
            self._held = None
            layer.load_state_dict(empty, assign=True)

    def run(self, index: int, hidden: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """Return the output of a layer for its input, [1, token, channel]; raise `ModelError` if it has a NaN."""
        out = self._forwards[index](hidden, **given)
        made: torch.Tensor = out[0] if isinstance(out, tuple) else out
        if bool(made.detach().isnan().any()):
            raise ModelError(f"the output of layer {index} is NaN; the model is damaged, or needs another --dtype")
        return made

    def prepared(self, call: Callable[[], Any], cache: Any) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """Return the first layer's input and every layer's arguments, with `_CACHE`, for a call of the model's body."""
        first: list[torch.Tensor] = []
        given: list[dict[str, Any]] = []

        def stub(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args or not any(value is cache for value in kwargs.values()):
                raise self._refused("its layers do not take their cache as a keyword argument")
            if first and hidden is not first[0]:
                raise self._refused("it changes the hidden states between two layers")
            first.append(hidden)
            given.append({name: _CACHE if value is cache else value for name, value in kwargs.items()})
            return hidden

        with self._instead([stub] * len(self.layers)):
            call()
        if len(given) != len(self.layers):
            raise self._refused(f"it calls {len(given)} of {len(self.layers)} layers")
        return first[0], given

    def after_layers(self, hidden: torch.Tensor, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, which runs the model, with ``hidden`` in place of the last layer's output."""

        def same(given: torch.Tensor, **_: Any) -> torch.Tensor:
            return given

        with self._instead([*[same] * (len(self.layers) - 1), lambda _hidden, **_: hidden]):
            return call()

    @contextmanager
    def _instead(self, forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
        before = [layer.forward for layer in self.layers]
        try:
            for layer, forward in zip(self.layers, forwards, strict=True):
                layer.forward = forward
            yield
        finally:
            for layer, forward in zip(self.layers, before, strict=True):
                layer.forward = forward


def open_layers(path: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, DiskLayers]:
    """Return a causal language model from a directory, in evaluation mode, and its layers on disk.

    Raise `ModelError` if transformers does not support the model, or the model cannot run layer by layer.
    """
    transformers = require("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)
    except Exception as error:  # transformers may raise anything
        raise ModelError(f"{path}: transformers cannot load this model ({error})") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{path}: quantised weights cannot be read layer by layer; use --load whole")
    model.eval()
    return model, DiskLayers(model, WeightFiles(path), device, dtype)


class LayerwiseEngine(TransformersEngine):
    """An engine that runs a model layer by layer, see `kvabr.publish.model.LayerEngine`."""

    def __init__(self, engine: TransformersEngine, layers: DiskLayers) -> None:
        """Wrap the engine of a model with layers on disk; raise `ModelError` unless each has only keys and values."""
        super().__init__(engine.model, engine.spec, context=engine.context)
        self._layers = layers
        self._spans: dict[tuple[int, int], list[dict[str, Any]]] = {}
        spec = engine.spec
        numbers = sorted(layer for each in spec.classes for layer in each.layers)
        if numbers != list(range(len(layers.layers))) or not all(map(_is_plain, spec.parts)):
            raise ModelError(
                f"{spec.model}: a model with layers that have more than keys and values ({spec.summary}) cannot "
                "be calibrated layer by layer; use --load whole"
            )

    def by_layer(
        self,
        contexts: Sequence[Sequence[int]],
        scored: Sequence[int],
        sink: LayerSink,
        progress: Callable[[str, int, int], None] = lambda _stage, _done, _all: None,
    ) -> None:
        """See `kvabr.publish.model.LayerEngine.by_layer`."""
        for ids in contexts:
            self.check(ids)
        with tempfile.TemporaryFile(prefix="kvabr-calibrate-") as file:
            inputs = _Inputs(file, [each for each in scored if each], self._width, self.dtype)
            hidden = self._forward(contexts, scored, sink, inputs, progress)
            slopes = {
                number: self._head(state, contexts[number][-scored[number] :], number)
                for number, state in hidden.items()
            }
            hidden.clear()
            self._backward(contexts, scored, sink, inputs, slopes, progress)

    @torch.no_grad()
    def _forward(
        self,
        contexts: Sequence[Sequence[int]],
        scored: Sequence[int],
        sink: LayerSink,
        inputs: _Inputs,
        progress: Callable[[str, int, int], None],
    ) -> dict[int, torch.Tensor]:
        """Run all contexts through all layers; return the last layer's output at scored tokens, by context."""
        hidden = [self._enter(ids) for ids in contexts]
        count = len(self._layers.layers)
        for index in range(count):
            with self._layers.held(index):
                place = 0
                for number, ids in enumerate(contexts):
                    if scored[number]:
                        inputs.write(index, place, hidden[number][:, -scored[number] :])
                        place += 1
                    cache = new_cache(self.model, whole=True)
                    hidden[number] = self._run(index, hidden[number], (0, len(ids)), cache)
                    layer = cache.layers[index]
                    sink.put_cache(number, index, torch.stack((layer.keys[0], layer.values[0])).cpu())
                    progress("forward", index * len(contexts) + number + 1, count * len(contexts))
        return {number: state[:, -scored[number] :].clone() for number, state in enumerate(hidden) if scored[number]}

    def _backward(
        self,
        contexts: Sequence[Sequence[int]],
        scored: Sequence[int],
        sink: LayerSink,
        inputs: _Inputs,
        slopes: dict[int, torch.Tensor],
        progress: Callable[[str, int, int], None],
    ) -> None:
        """Propagate gradients from the last layer's output back through all layers; store those for caches."""
        count, done = len(self._layers.layers), 0
        for index in reversed(range(count)):
            with self._layers.held(index), torch.enable_grad():
                for place, (number, slope) in enumerate(slopes.items()):
                    hidden = inputs.read(index, place).to(self.device).requires_grad_()
                    kept = sink.kept(number, index).to(self.device, self.dtype, copy=True).requires_grad_()
                    cache = new_cache(self.model, whole=True)
                    cache.update(kept[0, None], kept[1, None], index)
                    start = len(contexts[number]) - scored[number]
                    out = self._run(index, hidden, (start, scored[number]), cache)
                    slopes[number], own = torch.autograd.grad(out, (hidden, kept), slope)
                    sink.put_gradient(number, index, own.float().cpu())
                    done += 1
                    progress("backward", done, count * len(slopes))

    def gradient_classes(
        self, kv: tuple[torch.Tensor, ...], tokens: Sequence[int], seed: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """See `TransformersEngine.gradient_classes`."""
        ids, cache, start = self._begin(tokens, kv)
        places = self.places()
        with torch.no_grad():
            hidden, _ = self._layers.prepared(lambda: self.model.base_model(**self._given(cache, ids, start)), cache)
            inputs = []
            for index in range(len(places)):
                inputs.append(hidden)
                with self._layers.held(index):
                    hidden = self._run(index, hidden, (start, len(tokens)), cache)
        slope = self._head(hidden, tokens, seed)
        out = tuple(torch.empty(part.shape) for part in kv)
        for index in reversed(range(len(places))):
            number, place = places[index]
            with self._layers.held(index), torch.enable_grad():
                before = inputs[index].detach().requires_grad_()
                kept = kv[number][place].detach().to(self.device, self.dtype, copy=True).requires_grad_()
                fresh = new_cache(self.model, whole=True)
                fresh.update(kept[0, None], kept[1, None], index)
                made = self._run(index, before, (start, len(tokens)), fresh)
                slope, own = torch.autograd.grad(made, (before, kept), slope)
                out[number][place] = own.float().cpu()
        return out

    def continue_classes(
        self, kv: tuple[torch.Tensor, ...], tokens: Sequence[int], seed: int = 0
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """See `TransformersEngine.continue_classes`; takes two passes."""
        return self.prefill_classes(tokens, kv), self.gradient_classes(kv, tokens, seed)

    @property
    def concurrent(self) -> bool:
        """Always False, as memory has space for one layer only."""
        return False

    @property
    def layer_bytes(self) -> int:
        """See `kvabr.publish.model.LayerEngine.layer_bytes`."""
        return len(self._layers.layers) * self._width * self.dtype.itemsize

    def places(self) -> list[tuple[int, int]]:
        """Return each layer's class and its index in the class's tensor."""
        found = {
            layer: (number, place)
            for number, each in enumerate(self.spec.classes)
            for place, layer in enumerate(each.layers)
        }
        return [found[layer] for layer in sorted(found)]

    @property
    def _width(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])

    def _enter(self, ids: Sequence[int]) -> torch.Tensor:
        cache = new_cache(self.model, whole=True)
        batch = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        return self._layers.prepared(lambda: self.model.base_model(**self._given(cache, batch, 0)), cache)[0]

    def _run(self, index: int, hidden: torch.Tensor, span: tuple[int, int], cache: Any) -> torch.Tensor:
        if span not in self._spans:
            self._spans[span] = self._prepare(*span)
        given = {name: cache if value is _CACHE else value for name, value in self._spans[span][index].items()}
        return self._layers.run(index, hidden, given)

    @torch.no_grad()
    def _prepare(self, start: int, count: int) -> list[dict[str, Any]]:
        cache = new_cache(self.model, whole=True)
        if start:
            for index in range(len(self._layers.layers)):
                few = torch.zeros((1, 1, start, 1), dtype=self.dtype, device=self.device)
                cache.update(few, few, index)
        ids = torch.zeros((1, count), dtype=torch.long, device=self.device)
        return self._layers.prepared(lambda: self.model.base_model(**self._given(cache, ids, start)), cache)[1]

    def _head(self, hidden: torch.Tensor, tokens: Sequence[int], seed: int) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], dtype=torch.long, device=self.device)
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = self._layers.after_layers(leaf, lambda: self.model(input_ids=ids, use_cache=False).logits[0])
            (slope,) = torch.autograd.grad(sample_next(logits, seed, self.spec.model), leaf)
        return slope


def _is_plain(part: KVSpec) -> bool:
    return part.only.kind in ("full", "window", "chunked") and not part.only.role and part.only.halves == 2


class _Inputs:
    """A file with the inputs of every layer at the scored tokens of every context, each [1, token, channel]."""

    def __init__(self, file: IO[bytes], tokens: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self._file, self._tokens, self._width, self._dtype = file, tokens, width, dtype
        sizes = [each * width * dtype.itemsize for each in tokens]
        self._starts = [sum(sizes[:place]) for place in range(len(sizes))]
        self._layer = sum(sizes)

    def write(self, layer: int, place: int, hidden: torch.Tensor) -> None:
        self._file.seek(layer * self._layer + self._starts[place])
        self._file.write(raw(hidden.cpu()))

    def read(self, layer: int, place: int) -> torch.Tensor:
        shape = 1, self._tokens[place], self._width
        data = bytearray(math.prod(shape) * self._dtype.itemsize)
        self._file.seek(layer * self._layer + self._starts[place])
        self._file.readinto(data)  # type: ignore[attr-defined]  # every binary file has it
        return torch.frombuffer(data, dtype=self._dtype).reshape(shape)
