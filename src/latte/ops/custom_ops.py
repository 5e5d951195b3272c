"""How the library registers a custom op, which ``torch.compile`` keeps as one node of its graph.

The arguments of an op are the fields of a NamedTuple class. Their names, types and defaults are the
op's schema. The functions of an op take one value of this class.

An op with gradients has its tensors first, then its numbers. Its backward pass is an op too,
``latte::NAME_backward``. It takes the gradients of the outputs, the tensors, what is saved, and the
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import torch
from torch import Tensor

from latte.ops.tensors import full_precision

# A tensor that the op overwrites.
Written = Annotated[Tensor, "written"]

# The types of arguments in an op's schema. "{}" becomes the index of an argument that is written.
TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Written: "Tensor(a{}!)",
    Written | None: "Tensor(a{}!)?",
    bool: "bool",
    int: "int",
    float: "float",
    float | None: "float?",
}
# Schemas of the ops whose kernels are in the native library.
NATIVE = torch.library.Library("latte", "FRAGMENT")


def empty_gradients(*inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Contiguous buffers of the inputs' shapes and dtypes, not written yet.

    An input that is None gets a tensor without numbers, because an op cannot return None.
    """
    like = next(x for x in inputs if x is not None)
    return tuple(
        like.new_empty(0)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in inputs
    )


def custom_op(
    name: str,
    arguments: type[Any],
    outputs: int,
    fake: Callable[[Any], Any],
    kernel: Callable[[Any], Any] | None = None,
) -> Any:
    """The op ``latte::NAME``, without gradients.

    Args:
        arguments: NamedTuple class of the op's arguments.
        outputs: Number of outputs, which are tensors. One output is not in a tuple.
        fake: Function of the arguments that makes empty outputs.
        kernel: Function of the arguments that computes the outputs. Autocast is off in it. None:
            the native library has the kernel.
    """
    # Native ops have no defaults: their only callers give all arguments.
    defaults = arguments._field_defaults if kernel is not None else {}
    schema = [
        f"{kind} {field}={defaults[field]}" if field in defaults else f"{kind} {field}"
        for field, kind in _types(arguments).items()
    ]

    def run(*given: Any) -> Any:
        assert kernel is not None
        return kernel(arguments(*given))

    def run_fake(*given: Any) -> Any:
        return fake(arguments(*given))

    return _register(name, schema, outputs, run_fake, None if kernel is None else run)


def differentiable_op(
    name: str,
    arguments: type[Any],
    fake: Callable[[Any], Any],
    forward: Callable[[Any], Any] | None = None,
    backward: Callable[..., Mapping[str, Tensor]] | None = None,
    *,
    returns: Sequence[str],
    gradients: Sequence[str],
    saves: Sequence[str] = (),
    optional: Sequence[str] = (),
    stand_ins: Mapping[str, str] | None = None,
) -> Any:
    """The op ``latte::NAME``, with gradients by ``latte::NAME_backward``.

    Args:
        arguments: NamedTuple class of the op's arguments, tensors before numbers.
        fake: Function of the arguments that makes empty outputs.
        forward: Function of the arguments that computes the outputs. None: the native library has
            the kernels of both passes.
        backward: Function of the arguments, the gradients of ``returns``, and ``saves``. It returns
            ``gradients`` by name, in any dtype. Those of arguments that are None may be missing.
        returns: Names of the outputs that have gradients.
        gradients: Names of the arguments that have gradients.
        saves: Names of the outputs that the backward pass needs. Those that are not in ``returns``
            come after them in the op's outputs.
        optional: Names of the ``returns`` whose gradients ``backward`` gets as None if they are
            missing. It gets zeros for others.
        stand_ins: Arguments that the backward pass does not read. Each is mapped to an output of
            the same shape and dtype, which the backward pass gets instead.
    """
    inputs = [f"{kind} {field}" for field, kind in _types(arguments).items()]
    count = sum(x.startswith("Tensor") for x in inputs)  # of tensors
    fields, outputs = arguments._fields, [*returns, *(x for x in saves if x not in returns)]
    saved_at = [outputs.index(x) for x in saves]
    wanted = [fields.index(x) for x in gradients]
    replaced = [(fields.index(x), outputs.index(y)) for x, y in (stand_ins or {}).items()]

    def run_back(*given: Any) -> tuple[Tensor, ...]:
        assert backward is not None
        grads, tensors, saved, numbers = _split(given, len(returns), count, len(saves))
        found = backward(arguments(*tensors, *numbers), *grads, *saved)
        results = []
        for i, field in zip(wanted, gradients, strict=True):
            if tensors[i] is None:
                dx = tensors[wanted[0]].new_empty(0)
            else:
                dx = found[field]
                dx = dx if dx.dtype == tensors[i].dtype else dx.to(tensors[i].dtype)
            results.append(dx)
        return tuple(results)

    def fake_back(*given: Any) -> tuple[Tensor, ...]:
        return empty_gradients(*(given[len(returns) + i] for i in wanted))

    op = custom_op(name, arguments, len(outputs), fake, forward)
    grads = [f"Tensor{'?' if x in optional else ''} d{x}" for x in returns]
    kept = [f"Tensor saved_{x}" for x in saves]
    backward_op = _register(
        f"{name}_backward",
        [*grads, *inputs[:count], *kept, *inputs[count:]],
        len(gradients),
        fake_back,
        None if backward is None else run_back,
    )

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        found = (output,) if isinstance(output, Tensor) else output
        tensors = inputs[:count]
        for i, j in replaced:
            tensors = (*tensors[:i], found[j], *tensors[i + 1 :])
        ctx.numbers = inputs[count:]
        ctx.save_for_backward(*tensors, *[found[i] for i in saved_at])
        ctx.mark_non_differentiable(*found[len(returns) :])
        # Missing gradients become zeros for ``returns`` alone, in `differentiate`.
        ctx.set_materialize_grads(False)
        ctx.like = [
            None if name in optional else (x.shape, x.dtype, x.device)
            for name, x in zip(returns, found, strict=False)
        ]

    def differentiate(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, numbers = ctx.saved_tensors, ctx.numbers
        asked = list(zip(given, ctx.like, strict=False))
        missing = iter(zeros_of([x for dy, x in asked if dy is None and x is not None]))
        grads = [next(missing) if dy is None and x is not None else dy for dy, x in asked]
        every: list[Tensor | None] = [None] * len(fields)
        check_first_order(f"latte::{name}")
        for i, dx in zip(wanted, backward_op(*grads, *tensors, *numbers), strict=True):
            every[i] = None if tensors[i] is None else dx
        return tuple(every)

    torch.library.register_autograd(op, differentiate, setup_context=save)
    return op


def check_first_order(op: str) -> None:
    """Refuse a backward pass that is to be differentiated itself.

    Raises:
        NotImplementedError: It is one with ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f'{op} has no second derivatives (create_graph=True); backend="reference" has them'
        )


def zeros_of(like: Sequence[tuple[torch.Size, torch.dtype, torch.device]]) -> list[Tensor]:
    """Zeros of these shapes, dtypes and devices: in one launch if they are of one kind."""
    if len({x[1:] for x in like}) != 1:
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in like]
    shapes, (_, dtype, device) = [x[0] for x in like], like[0]
    flat = torch.zeros(sum(x.numel() for x in shapes), dtype=dtype, device=device)
    parts = flat.split([x.numel() for x in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _types(arguments: type[Any]) -> dict[str, str]:
    """The types of an op's arguments, by name."""
    hints = get_type_hints(arguments, include_extras=True)
    return {field: TYPES[hints[field]].format(i) for i, field in enumerate(arguments._fields)}


def _register(
    name: str,
    inputs: Sequence[str],
    outputs: int,
    fake: Callable[..., Any],
    kernel: Callable[..., Any] | None,
) -> Any:
    """An op with these inputs in its schema. ``kernel`` is None if the native library has it."""
    schema = f"({', '.join(inputs)}) -> ({', '.join(['Tensor'] * outputs)})"
    if kernel is None:
        NATIVE.define(name + schema)
    else:
        run = full_precision(kernel)
        torch.library.custom_op(f"latte::{name}", run, mutates_args=(), schema=schema)
    op = getattr(torch.ops.latte, name).default
    torch.library.register_fake(op, fake)
    return op


def _split(given: tuple[Any, ...], *sizes: int) -> Iterator[tuple[Any, ...]]:
    """Tuples of the next values, of these sizes in turn, and a last one of those that remain."""
    for size in sizes:
        yield given[:size]
        given = given[size:]
    yield given
