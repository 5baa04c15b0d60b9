"""Lookups as autograd functions, and as operators that a compiled model calls without a graph break.

An operator refers to a batch and a module by number. Its second result is a tensor that autograd saves, with the state
of its backward as an attribute. It reads another batch at each call, so a CUDA graph must not contain it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence  # noqa: TC003 - operators' schemas are read at run time
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import numpy as np
import torch

from tiercache.errors import StateError
from tiercache.train.table_module import refuse_transform
from tiercache.values.compiled import batch_of, module_of, not_compiled
from tiercache.values.torch_internals import is_of_transform

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from tiercache.rows.backends.base import Backend
    from tiercache.train.anchors import Anchor
    from tiercache.train.arrivals import Arrival
    from tiercache.train.table_lookup import RemoteLookup, TableLookup
    from tiercache.train.table_module import TableModule
    from tiercache.values.batch import Batch

_CONTEXT = "tiercache_context"


class Context:
    """The ``ctx`` of a `torch.autograd.Function` for one call of an operator."""

    def __init__(self, anchor: torch.Tensor) -> None:
        self.needs_input_grad = (anchor.requires_grad,)
        self.run_backward: Callable[[Any, Sequence[torch.Tensor | None]], tuple[torch.Tensor | None, dict[str, Any]]]
        """Takes this and the gradients of the outputs; returns the anchor's gradient and the weights' by feature."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing."""


class _OnceDifferentiable(torch.autograd.Function):
    """Copies the first of some tensors; derivatives of the copies, or through the others, raise an error."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return copies."""
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(
            "the gradient of a lookup was differentiated, but lookups have first derivatives only: exclude the "
            "gradients of embedding modules and of per_sample_weights from double differentiation (torch.autograd.grad("
            "..., create_graph=True)), or weight the vectors of tc.Embedding by a product"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward whose results raise an error, with a remedy, when they are differentiated."""

    @not_compiled
    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if not torch.is_grad_enabled():  # any backward without create_graph
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        tensors = [one for one in found if one is not None]
        if not tensors or not any(g is not None and g.requires_grad for g in grads):
            return found
        leaves = [one.detach().requires_grad_() for one in tensors]
        sources = [g for g in grads if g is not None]
        marked = iter(_OnceDifferentiable.apply(len(leaves), *leaves, *sources))  # type: ignore[no-untyped-call]
        return tuple(None if one is None else next(marked) for one in found)

    return run


class Marker(NamedTuple):
    """Passes the gradients of one lookup's outputs to the anchor of its module."""

    parameter: nn.Parameter  # the anchor, as the lookup had it
    anchor: Anchor | None  # None: rows are not trained
    tables: Sequence[str]
    is_known: bool  # True if the cache has the module, or accepts any

    @classmethod
    def of(cls, module: TableModule, batch: Batch) -> Marker:
        """Begin a lookup: check that the rows of a batch can be looked up, and load them."""
        refuse_transform(module.tables)
        if not module.anchor.is_leaf and torch.is_grad_enabled():
            raise StateError(
                f"the parameter of the module that looks up {', '.join(map(repr, module.tables))} was replaced by a "
                "computed tensor, as by torch.func.functional_call with updated parameters, but rows do not follow "
                "it: replace the parameters of dense modules only"
            )
        is_known = module.begin_lookup(batch)
        gradients = batch.rows.gradients
        anchor = None if gradients is None else gradients.anchors.of(module)
        return cls(module.anchor, anchor, module.tables, is_known)

    def arrive(self, gradients: Sequence[torch.Tensor | None], tables: Sequence[Collection[str]]) -> Arrival | None:
        """Record gradients of outputs, of rows of ``tables``; None if there is none, or if the module is frozen."""
        if self.anchor is None or not self.parameter.requires_grad:
            return None
        if all(one is None for one in gradients):
            return None
        if any(one is not None and is_of_transform(one) for one in gradients):
            raise StateError(
                f"gradients of the rows of {', '.join(map(repr, self.tables))} came in batches, as from "
                "torch.autograd.grad(..., is_grads_batched=True), but lookups take one at a time: call "
                "torch.autograd.grad for each output"
            )
        anchors = self.anchor.anchors
        if not self.is_known:
            anchors.refuse_reader(self.tables)
        if anchors.ledger is not None:
            anchors.ledger.arrive()
        return self.anchor.arrive(self.parameter, gradients, tables)

    def gradient(self, gradients: Sequence[torch.Tensor | None], arrived: Arrival | None) -> Any:
        """Return the gradient of the anchor."""
        return None if arrived is None else arrived.anchor.anchors.gradient_of(self.parameter, gradients)


class PooledFunction(torch.autograd.Function):
    """Looks features up and pools them into one output."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, marker: Marker, backend: Backend, lookups: list[TableLookup],
                remote: list[RemoteLookup], shape: tuple[int, int], names: tuple[str, ...],
                *_weights: torch.Tensor) -> torch.Tensor:  # fmt: skip
        """Return (N, columns)."""
        # allocated here: torch forbids in-place changes of an input that is returned
        out = backend.empty(shape, np.float32)
        if lookups:
            results = backend.pool([(one.rows, one.entries) for one in lookups], out)
            for lookup, found in zip(lookups, results, strict=True):
                lookup.found = found
        result = backend.tensor(out)
        for one in remote:
            one.write(result)
        ctx.marker, ctx.backend, ctx.lookups, ctx.remote, ctx.names = marker, backend, lookups, remote, names
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the anchor and of the weights, and defer those of rows to the step."""
        backend: Backend = ctx.backend
        by_name: dict[str, torch.Tensor] = {}
        arrived: Arrival | None = None
        if grads[0] is not None:
            if ctx.needs_input_grad[0]:
                arrived = ctx.marker.arrive(grads, [ctx.marker.tables])
            for lookup in ctx.lookups:
                if set(lookup.part.features) & set(ctx.names):
                    found = lookup.weight_gradients(backend.array(grads[0]))
                    by_name |= {name: backend.tensor(gradient) for name, gradient in found.items()}
            if arrived is not None:
                for one in (*ctx.lookups, *ctx.remote):
                    one.defer(grads[0].shape[1], arrived)
        anchor = ctx.marker.gradient(grads, arrived)
        return anchor, None, None, None, None, None, None, *(by_name.get(name) for name in ctx.names)

    @staticmethod
    def run_backward(ctx: Any, grads: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Return the anchor's gradient, and the gradients of weights by feature."""
        anchor, *others = PooledFunction.backward(ctx, *grads)
        return anchor, dict(zip(ctx.names, others[6:], strict=True))


class RowFunction(torch.autograd.Function):
    """Looks up one vector for each id."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, marker: Marker, backend: Backend,
                lookups: list[TableLookup]) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Return (ids, dim) of each feature, in the order of the lookups."""
        ctx.marker, ctx.lookups = marker, lookups
        ctx.set_materialize_grads(False)
        # a custom operator must not return tensors that share memory
        outs, results = backend.gather(
            [(lookup.rows, lookup.entries) for lookup in lookups], apart=isinstance(ctx, Context)
        )
        for lookup, found in zip(lookups, results, strict=True):
            lookup.found = found
        return tuple(backend.tensor(out) for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        """Return the gradient of the anchor, and defer those of rows to the step."""
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        arrived = ctx.marker.arrive(grads, [(table,) for lookup in ctx.lookups for table in lookup.part.tables])
        if arrived is not None:
            first = 0
            for lookup in ctx.lookups:
                lookup.defer_rows(first, arrived)
                first += len(lookup.part.features)
        return ctx.marker.gradient(grads, arrived), None, None, None

    @staticmethod
    def run_backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """Return the anchor's gradient, given those of each feature's vectors."""
        flat = [
            None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in map(grads.__getitem__, ctx.order)
        ]
        return RowFunction.backward(ctx, *flat)[0], {}


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
    by_name = dict(zip(names.split(","), weights, strict=True)) if names else {}
    with torch.set_grad_enabled(trained):
        return _run(anchor, number, module, by_name)


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


def _run(anchor: torch.Tensor, number: torch.Tensor, module: int, *weights: Any) -> tuple[Any, torch.Tensor]:
    """Return the output of a module's lookup, and a token for backward: 1 with its context, 0 without gradients."""
    context = Context(anchor)
    out = module_of(module).run(context, batch_of(number), *weights)
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
