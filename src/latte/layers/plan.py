"""What a step of decoding calls and what it reads, decided once.

A step (:mod:`latte.layers.step`) does not call every module of a layer. In the place of some it
calls their ``step``, which reads their parameters; native kernels read the weights of linear maps,
norms and gated networks. A hook of such a module would not run, and accelerate's hooks are what
loads offloaded parameters. So a module is passed over only while it is nothing but its class.

These questions have the same answers for every token. A :class:`StepPlan` keeps the answers, and
what they rest on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils.hooks import RemovableHandle

from latte.layers.kept_scores import EPS
from latte.layers.native import (
    ACTIVATIONS,
    GATED,
    NORMS,
    direct,
    is_hooked,
    native_integers,
    native_maps,
    native_weights,
)
from latte.layers.parts import InitializedModule
from latte.ops import decoding


class LayerParts(NamedTuple):
    """The modules of a decoder layer.

        x = x + post_mixer(mixer(mixer_norm(x))),   x = x + post_mlp(mlp(mlp_norm(x)))

    Attributes:
        mixer: Mixer, with a ``_step`` and an ``o_proj``.
        mlp_norm, mlp: Norm and feed-forward network; None if there is none.
        post_mixer, post_mlp: Norms of the outputs; None if there are none.
        table: Which of the model's rotary tables the mixer takes; None if there is one for all.
        block: The layer itself.
    """

    mixer_norm: Any
    mixer: Any
    mlp_norm: Any
    mlp: Any
    post_mixer: Any = None
    post_mlp: Any = None
    table: Any = None
    block: Any = None


def stepped_over(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that the step of ``module`` does not call: itself, and some within it."""
    yield module
    names = getattr(module, "stepped", ())
    for name, child in module._modules.items():
        if child is not None and (name in names or isinstance(child, InitializedModule)):
            yield from stepped_over(child)


class _Watched(NamedTuple):
    """What the answers rest on. No two hooks have the same key."""

    kinds: list[type]
    hooks_made: int
    mixing: list[Any]
    hooks: list[int]
    patched: list[bool]
    children: list[nn.Module | None]
    parameters: list[int]
    dtypes: list[torch.dtype]
    steps: list[bool]
    training: list[bool]


class StepPlan:
    """The answers for some layers. A plan without layers keeps none and asks anew each time.

    Args:
        layers: Parts of a decoder's layers.
        others: Modules outside of the layers that a step asks about.
        kinds: Classes of layers whose calls a step may take the place of.
    """

    def __init__(
        self,
        layers: Sequence[LayerParts] = (),
        others: Iterable[nn.Module] = (),
        kinds: Collection[type] = (),
    ) -> None:
        self.layers = layers
        self.able = all(_is_able(parts, kinds) for parts in layers)
        self._kept: dict[Any, Any] = {}
        self._like: tuple[Any, ...] = ()
        # What one call for all layers is given, by the StepContext of its buffers; None: unplanned.
        self.wholes: WeakKeyDictionary[Any, Any] | None = None
        self._found: _Watched | None = None
        if torch.compiler.is_compiling() or not layers:
            return
        modules = chain(others, *(parts.block.modules() for parts in layers))
        self._modules = [*dict.fromkeys(modules)]
        self._own = [module.__dict__ for module in self._modules]
        self._mixers = [parts.mixer.__dict__ for parts in layers]
        # A module without children or parameters gets none that its class uses.
        self._children = [own["_modules"] for own in self._own if own["_modules"]]
        self._held = [own["_parameters"] for own in self._own if own["_parameters"]]
        # New hooks are counted, so only those that may be removed are looked at.
        names = "_forward_hooks", "_forward_pre_hooks"
        hooks = [own[name] for own in self._own for name in names]
        hooks += _global_forward_hooks, _global_forward_pre_hooks
        self._hooks = [x for x in hooks if x]
        # The plan keeps the parameters, so that no later one has the id of one of these.
        parameters = chain.from_iterable(map(dict.values, self._held))
        self._parameters = [x for x in parameters if x is not None]
        steppers = chain.from_iterable(stepped_over(parts.mixer) for parts in layers)
        # What a module with a `mixing` can follows from that.
        self._steppers = [x for x in steppers if hasattr(x, "steps") and "mixing" not in vars(x)]
        self._dropouts = [x for x in self._modules if isinstance(x, nn.Dropout)]
        self._found = self._state()

    def holds(self) -> bool:
        """Whether the layers, and all modules in them, are as they were.

        This is asked for every token, so all loops are those of built-in functions. Most of the
        time is that of fetching from memory what the weights have driven out of the caches.
        """
        return self._found is not None and self._state() == self._found

    def _state(self) -> _Watched:
        # A copy of a list touches all its objects at once, not each after the one before.
        for objects in self._modules, self._own, self._children, self._held, self._parameters:
            objects.copy()
        return _Watched(
            [*map(type, self._modules)],
            RemovableHandle.next_id,
            [*map(dict.get, self._mixers, repeat("mixing"))],
            [*chain.from_iterable(self._hooks)],
            [*map(contains, self._own, repeat("forward"))],
            [*chain.from_iterable(map(dict.values, self._children))],
            [*map(id, chain.from_iterable(map(dict.values, self._held)))],
            [*map(attrgetter("dtype"), self._parameters)],
            [*map(attrgetter("steps"), self._steppers)],
            [*map(attrgetter("training"), self._dropouts)],
        )

    @staticmethod
    def of(decoder: Any) -> StepPlan:
        """A decoder's plan. It is made when there is none that holds (``make_step_plan``)."""
        plan = decoder.__dict__.get("_step_plan")
        if plan is None or not plan.holds():
            plan = decoder.make_step_plan()
            if not torch.compiler.is_compiling():
                decoder.__dict__["_step_plan"] = plan
        return plan

    def begin(self, x: Tensor) -> StepPlan:
        """The plan of a token, for inputs like x (B, 1, E)."""
        if self._found is None or torch.compiler.is_compiling():
            return UNPLANNED
        like = x.dtype, decoding.serves(x), decoding.serves(x, x.numel())
        if like != self._like:  # other kernels serve
            self._like, self._kept, self.wholes = like, {}, WeakKeyDictionary()
        return self

    def __deepcopy__(self, memo: Any) -> StepPlan:
        """A copy of a decoder makes its own plan."""
        return UNPLANNED

    def __reduce__(self) -> Any:
        return StepPlan, ()

    # --- modules, or kernels in their place -----------------------------------------------------

    def weights(
        self,
        x: Tensor,
        modules: tuple[Any, ...],
        kinds: Iterable[type[nn.Module]],
        most_rows: int = decoding.MOST_ROWS,
    ) -> list[Tensor]:
        """As :func:`latte.layers.native.native_weights`."""
        found = self._kept.get(modules)
        if found is None:
            found = self._keep(modules, native_weights(x, modules, kinds, most_rows))
        return found

    def _integers(self, x: Tensor, maps: tuple[Any, ...]) -> list[Tensor]:
        """As :func:`latte.layers.native.native_integers`."""
        key = ("integers", *maps)
        found = self._kept.get(key)
        return self._keep(key, native_integers(x, maps)) if found is None else found  # type: ignore[no-any-return]

    def _keep(self, modules: Any, answer: Any) -> Any:
        if self._found is not None:
            self._kept[modules] = answer
        return answer

    def linear_maps(self, x: Tensor, *maps: Any) -> tuple[Tensor, ...]:
        """The output of up to three linear maps for x (B, E)."""
        weights = self.weights(x, maps, (nn.Linear,) * len(maps))
        if weights:
            return decoding.linear_maps(x, *weights)
        if integers := self._integers(x, maps):
            return decoding.quantised_maps(x, *integers)
        return tuple(self._call(x, linear) for linear in maps)

    def linear_add(self, x: Tensor, linear: Any, residual: Tensor) -> Tensor:
        """``residual + linear(x)`` for x (B, E)."""
        if residual.dtype == x.dtype and residual.is_contiguous():
            if weights := self.weights(x, (linear,), (nn.Linear,)):
                return decoding.linear_add(x, weights[0], residual)
            if integers := self._integers(x, (linear,)):
                return decoding.quantised_add(x, integers, residual)
        return residual + self._call(x, linear)

    def _call(self, x: Tensor, linear: Any) -> Tensor:
        """The output of a map whose weights no kernel reads."""
        called = self._kept.get((linear, x.dtype))
        if called is None:
            called = self._keep((linear, x.dtype), direct(x, linear))
        return called(x)  # type: ignore[no-any-return]

    def norm(self, module: Any, x: Tensor) -> Tensor:
        """A norm's output for x (B, ..., E)."""
        asked = self._kept.get((module, x.dtype))
        if asked is None:
            asked = self._keep((module, x.dtype), _norm_arguments(module, x))
        return decoding.rms_norm(x, *asked) if asked else module(x)

    def latents(self, module: Any, z: Tensor) -> tuple[Any, ...]:
        """The logits of a ``LatentLogits`` for z (B, E); empty if its maps are called."""
        key = (module, z.dtype)
        found = self._kept.get(key)
        if found is None:
            found = self._keep(key, module.native(z))
        given: Any = *found, module.num_heads
        return decoding.latents(z, *given) if found else ()

    def layer_arguments(self, parts: LayerParts, x: Tensor) -> tuple[tuple[Any, ...], ...]:
        """What the kernels that begin and end a layer are given; empty where modules are called."""
        found = self._kept.get(parts.mixer)
        if found is None:
            found = _begin_arguments(parts, x), _end_arguments(parts, x)
            self._keep(parts.mixer, found)
        return found  # type: ignore[no-any-return]

    def begin_layer(self, parts: LayerParts, x: Tensor) -> tuple[Tensor, ...]:
        """As :func:`latte.ops.decoding.layer_begin`, for x (B, E); empty if modules are called."""
        found = self.layer_arguments(parts, x)[0]
        return decoding.layer_begin(x, *found) if found else ()

    def end_layer(self, parts: LayerParts, mixed: Tensor, x: Tensor) -> Tensor | None:
        """As :func:`latte.ops.decoding.layer_end`, for x (B, E); None if modules are called."""
        found = self.layer_arguments(parts, x)[1]
        if not found or mixed.dtype != x.dtype:
            return None
        if not (mixed.is_contiguous() and x.is_contiguous()):
            return None
        return decoding.layer_end(mixed, x, *found)

    def feed_forward(self, mlp: Any, norm: Any, x: Tensor, adds: bool) -> Tensor:
        """``mlp(norm(x))`` for x (B, E), added to x if ``adds``."""
        asked = self._kept.get((mlp, norm))
        if asked is None:
            asked = self._keep((mlp, norm), _gated_arguments(mlp, norm, x))
        if asked and asked[0] is decoding.quantised_mlp:
            return decoding.quantised_mlp(x, *asked[1], adds)
        n = self.norm(norm, x)
        if not asked:
            return x + mlp(n) if adds else mlp(n)
        kernel, weights = asked
        inner, down = kernel(n, *weights), mlp._modules["down_proj"]
        return self.linear_add(inner, down, x) if adds else self.linear_maps(inner, down)[0]


UNPLANNED = StepPlan()


def _is_able(parts: LayerParts, kinds: Collection[type]) -> bool:
    """Whether a step may take the place of a call of this layer."""
    own = parts.block.__dict__
    if type(parts.block) not in kinds or "forward" in own:
        return False
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    # A step has no dropout.
    if any(isinstance(x, nn.Dropout) and x.training and x.p for x in parts.block.modules()):
        return False
    return all(getattr(x, "steps", False) and not is_hooked(x) for x in stepped_over(parts.mixer))


def _norm_arguments(module: Any, x: Tensor) -> tuple[Any, ...]:
    """The arguments of the kernel in the place of an RMSNorm; empty if the norm is called."""
    kind = type(module)
    if kind not in NORMS or (NORMS[kind].in_fp32 and x.dtype == torch.float64):
        return ()
    weights = native_weights(x, (module,), (kind,))
    own = module.__dict__
    eps = own["variance_epsilon"] if "variance_epsilon" in own else own["eps"]
    return (weights[0], eps, NORMS[kind].offset) if weights and eps is not None else ()


def _begin_arguments(parts: LayerParts, x: Tensor) -> tuple[Any, ...]:
    """The arguments of the kernel that begins a layer; empty if its modules are called."""
    mixer, norm = parts.mixer, _norm_arguments(parts.mixer_norm, x)
    if not norm or "begins" not in vars(type(mixer)) or not mixer.reads_latents:
        return ()
    own = mixer._modules
    latents = own["latents"]
    if latents._modules["input"].kind != "none":
        return ()
    maps = native_maps(x, own["q_proj"], own["k_proj"], own["v_proj"])
    weights, scores, scored = latents.native(x), latents._modules.get("kept_scores"), (None,) * 4
    if scores is not None and weights:
        scored = scores.native(weights[0])
    if not (maps and weights and scored):
        return ()
    return *norm, *maps, mixer.num_heads, mixer.num_key_value_heads, *weights, *scored, EPS


def _end_arguments(parts: LayerParts, x: Tensor) -> tuple[Any, ...]:
    """The arguments of the kernel that ends a layer; empty if its modules are called."""
    if parts.mlp is None or parts.post_mixer is not None or parts.post_mlp is not None:
        return ()
    kernel, modules, kinds = _gate(parts.mlp)
    own, norm = parts.mlp._modules, _norm_arguments(parts.mlp_norm, x)
    if kernel is None or any(map(is_hooked, modules)) or not norm:
        return ()
    output = native_maps(x, parts.mixer._modules["o_proj"])
    maps = native_maps(x, *(own.get(name) for name in ("gate_proj", "up_proj", "down_proj")))
    ready = output and maps
    return (*output, *norm, *maps, kernel is decoding.geglu) if ready else ()


def _gate(mlp: Any) -> tuple[Any, list[Any], list[type]]:
    """The kernel in the place of a gated network, or None; the modules it stands for, and kinds."""
    kernel, kind = GATED.get(type(mlp)), type(mlp)
    if kind not in GATED or kernel is not None:
        return kernel, [mlp], [kind]
    act = mlp._modules.get("act_fn")  # it says which
    return ACTIVATIONS.get(type(act)), [mlp, act], [kind, type(act)]


def _gated_arguments(mlp: Any, norm: Any, x: Tensor) -> tuple[Any, ...]:
    """The kernel in the place of a gated network, and its weights; empty if it is called.

    That of quantised networks, with its other arguments, is in the place of the norm too.
    """
    (kernel, modules, kinds), parts = _gate(mlp), mlp._modules
    if kernel is None:
        return ()
    maps = parts.get("gate_proj"), parts.get("up_proj")
    weights = native_weights(x, (*modules, *maps), (*kinds, nn.Linear, nn.Linear))
    if weights:
        return kernel, weights
    ready, down = not any(map(is_hooked, modules)), parts.get("down_proj")
    integers = native_integers(x, (*maps, down)) if ready else []
    if integers and (normed := _norm_arguments(norm, x)):
        return decoding.quantised_mlp, (normed, integers, kernel)
    called = [direct(x, linear) for linear in maps]
    if not ready or any(map(is_, called, maps)):
        return ()
    product = decoding.PRODUCTS[kernel]
    return (lambda x: product(*(call(x) for call in called))), ()
