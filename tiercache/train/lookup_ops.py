"""Lookups as operators of torch: what a compiled model calls in place of Python, without a break of its graph.

An operator takes tensors and numbers, so it finds a batch and a module by a number. What its backward needs is an
attribute of its second result, a tensor that autograd saves: it lives as long as the graph. An operator reads another
batch at each call, so a CUDA graph, which repeats one, must not hold it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence  # noqa: TC003 - operators' schemas are read at run time
from typing import TYPE_CHECKING, Any, Optional

import torch

from tiercache.values.compiled import batch_of, module_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiercache.values.batch import Batch

_CONTEXT = "tiercache_context"


class Context:
    """What the backward of one lookup needs: in place of the ``ctx`` of an `torch.autograd.Function`."""

    def __init__(self, anchor: torch.Tensor) -> None:
        self.needs_input_grad = (anchor.requires_grad,)
        self.run_backward: Callable[[Any, Sequence[torch.Tensor | None]], tuple[torch.Tensor | None, dict[str, Any]]]
        """Given this and the gradients of the outputs: that of the anchor, and those of weights by feature."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing."""


class _OnceDifferentiable(torch.autograd.Function):
    """The first of some tensors, of which a derivative raises an error.

    The others are what they were computed from: a derivative that goes through them to a leaf comes here too.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return copies."""
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(
            "the gradient of a lookup was differentiated, and lookups have first derivatives only: leave the gradients "
            "of embedding modules and of per_sample_weights out of what is differentiated twice (torch.autograd.grad("
            "..., create_graph=True)), or weight the vectors of tc.Embedding by a product"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of a lookup whose results raise RuntimeError when they are differentiated.

    As `torch.autograd.function.once_differentiable`, with an error that says what to do.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        tensors = [one for one in found if one is not None]
        if not tensors or not torch.is_grad_enabled() or not any(g is not None and g.requires_grad for g in grads):
            return found
        given = [g for g in grads if g is not None]
        of_leaves = [one.detach().requires_grad_() for one in tensors]
        marked = iter(_OnceDifferentiable.apply(len(of_leaves), *of_leaves, *given))  # type: ignore[no-untyped-call]
        return tuple(None if one is None else next(marked) for one in found)

    return run


def look_up_bags(module: Any, batch: Batch, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Look up as ``EmbeddingBagCollection.forward``."""
    out: torch.Tensor = _bags(
        module.anchor, batch.number, list(weights.values()), ",".join(weights), module.number, module.out_features,
        torch.is_grad_enabled(),
    )[0]  # fmt: skip
    return out


def look_up_rows(module: Any, batch: Batch) -> list[torch.Tensor]:
    """Look up as ``EmbeddingCollection.forward``: the vectors of each feature."""
    shapes = [(dim, module.length_of(name)) for name, dim in zip(module.features, module.dims, strict=True)]
    dims, lengths = [dim for dim, _ in shapes], [length for _, length in shapes]
    found: list[torch.Tensor] = _rows(
        module.anchor, batch.number, dims, lengths, module.number, torch.is_grad_enabled()
    )[:-1]  # fmt: skip
    return found


@torch.library.custom_op("tiercache::embedding_bags", mutates_args=())
def _bags(
    anchor: torch.Tensor, number: torch.Tensor, weights: Sequence[torch.Tensor], names: str, module: int, width: int,
    trained: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    given = dict(zip(names.split(","), weights, strict=True)) if names else {}
    with torch.set_grad_enabled(trained):
        return _run(anchor, number, module, given)


@torch.library.custom_op("tiercache::embedding_rows", mutates_args=())
def _rows(
    anchor: torch.Tensor, number: torch.Tensor, dims: Sequence[int], lengths: Sequence[int], module: int, trained: bool
) -> list[torch.Tensor]:
    with torch.set_grad_enabled(trained):
        outs, token = _run(anchor, number, module)
    return [*outs, token]


@torch.library.custom_op("tiercache::embedding_backward", mutates_args=())
def _backward(
    grads: Sequence[Optional[torch.Tensor]],  # noqa: UP045 - schemas are made of this spelling
    token: torch.Tensor, anchor: torch.Tensor, weights: Sequence[torch.Tensor], names: str,
) -> list[torch.Tensor]:  # fmt: skip
    context = getattr(token, _CONTEXT, None)
    if int(token) and context is None:
        raise RuntimeError("a lookup's backward was called with a copy of what its forward returned")
    gradient, by_name = (None, {}) if context is None else context.run_backward(context, grads)
    named = names.split(",") if names else []
    found = [by_name.get(name) for name in named]
    zero = torch.zeros_like(anchor)
    return [zero if gradient is None else gradient] + [
        torch.zeros_like(weight) if one is None else one.clone() for one, weight in zip(found, weights, strict=True)
    ]


def _run(anchor: torch.Tensor, number: torch.Tensor, module: int, *given: Any) -> tuple[Any, torch.Tensor]:
    """Return what a module looks up, and what backward is given: 1 with its context, 0 where there is no backward."""
    context = Context(anchor)
    out = module_of(module).run(context, batch_of(number), *given)
    token = torch.full((), int(torch.is_grad_enabled()), device="cpu")
    if torch.is_grad_enabled():
        setattr(token, _CONTEXT, context)
    return out, token


@_bags.register_fake
def _(anchor: torch.Tensor, number: torch.Tensor, weights: Any, names: str, module: int, width: int,
      trained: bool) -> Any:  # fmt: skip
    return anchor.new_empty((number.shape[0], width), dtype=torch.float32), torch.empty(
        (), dtype=torch.int64, device="cpu"
    )


@_rows.register_fake
def _(anchor: torch.Tensor, number: torch.Tensor, dims: Any, lengths: Any, module: int, trained: bool) -> Any:
    def shape(dim: int, length: int) -> tuple[Any, ...]:
        if length < 0:
            return torch.library.get_ctx().new_dynamic_size(), dim
        return (number.shape[0], length, dim) if length else (number.shape[0], dim)

    found = [
        anchor.new_empty(shape(dim, length), dtype=torch.float32) for dim, length in zip(dims, lengths, strict=True)
    ]
    return [*found, torch.empty((), dtype=torch.int64, device="cpu")]


@_backward.register_fake
def _(grads: Any, token: torch.Tensor, anchor: torch.Tensor, weights: Any, names: str) -> Any:
    return [torch.empty_like(anchor), *(torch.empty_like(weight) for weight in weights)]


def _setup_bags(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1], inputs[0], *inputs[2])
    ctx.names = inputs[3]


def _backward_bags(ctx: Any, grad: torch.Tensor, _token: Any) -> Any:
    token, anchor, *weights = ctx.saved_tensors
    gradient, *of_weights = _backward([grad], token, anchor, weights, ctx.names)
    return gradient, None, of_weights, None, None, None, None


def _setup_rows(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1], inputs[0])


def _backward_rows(ctx: Any, grads: Any) -> Any:
    token, anchor = ctx.saved_tensors
    return _backward(grads[:-1], token, anchor, [], "")[0], None, None, None, None, None


_bags.register_autograd(_backward_bags, setup_context=_setup_bags)
_rows.register_autograd(_backward_rows, setup_context=_setup_rows)
