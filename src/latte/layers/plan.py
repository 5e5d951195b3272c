"""Whether a decoder can take a step, asked once.

A step of decoding (:mod:`latte.layers.step`) does not call every module of a layer. In the place
of some it calls their ``step``, which reads their parameters. A hook of such a module would not
run, and accelerate's hooks are what loads offloaded parameters. So a decoder takes steps only
while each of these modules is nothing but its class. All other modules, such as linear maps, are
called, or :func:`latte.layers.native.native_weights` checks them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, repeat
from operator import attrgetter, contains
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from latte.layers.parts import Drawn


def stepped_over(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that the step of ``module`` does not call: itself, and some within it."""
    yield module
    names = getattr(module, "stepped", ())
    for name, child in module._modules.items():
        if child is not None and (name in names or isinstance(child, Drawn)):
            yield from stepped_over(child)


class _Found(NamedTuple):
    """Classes of the modules, whether they step, keys of their hooks (unique), sub-modules."""

    kinds: list[type]
    steps: list[bool]
    hooks: list[int]
    children: list[nn.Module | None]


class StepPlan:
    """Whether steps may pass these modules over, and whether that still holds.

    Args:
        modules: Modules that a step does not call.
        kinds: Classes that have a step, besides those with ``steps``.
        ignored: Hooks that have no effect in a step.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        kinds: Collection[type] = (),
        ignored: Collection[Any] = (),
    ) -> None:
        self._modules = [*modules]
        self._own = [module.__dict__ for module in self._modules]
        names = "_forward_hooks", "_forward_pre_hooks"
        self._hooks = [own[name] for own in self._own for name in names]
        self._children = [own["_modules"] for own in self._own]
        self._steppers = [x for x in self._modules if type(x) not in kinds]
        self._found = None
        if all(hasattr(x, "steps") for x in self._steppers):
            hooks = chain.from_iterable(hooks.values() for hooks in self._hooks)
            if all(x in ignored for x in hooks) and not self._patched():
                self._found = self._state()
        self.able: bool = self._found is not None and all(self._found.steps)

    def holds(self) -> bool:
        """Whether steps are still possible: the modules, their hooks and sub-modules are the same.

        This is asked for every token, so all loops are those of built-in functions.
        """
        return self.able and self._state() == self._found and not self._patched()

    def _state(self) -> _Found:
        return _Found(
            [*map(type, self._modules)],
            [*map(attrgetter("steps"), self._steppers)],
            [*chain.from_iterable(self._hooks)],
            [*chain.from_iterable(map(dict.values, self._children))],
        )

    def _patched(self) -> bool:
        """Whether a module has a ``forward`` of its own, or all modules of the process a hook."""
        if _global_forward_hooks or _global_forward_pre_hooks:
            return True
        return any(map(contains, self._own, repeat("forward")))

    @staticmethod
    def able_now(decoder: nn.Module, make: Callable[[], StepPlan]) -> bool:
        """Whether a decoder can take a step. Its plan is made when there is none that holds."""
        plan = decoder.__dict__.get("_step_plan")
        if plan is None or not plan.holds():
            plan = make()
            if not torch.compiler.is_compiling():
                decoder.__dict__["_step_plan"] = plan
        return plan.able

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the decoder makes its own plan."""

    def __reduce__(self) -> Any:
        return type(None), ()
