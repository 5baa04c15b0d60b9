"""Numbers by which operators in compiled models find batches and modules, and functions that stay as they are there."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_numbers = itertools.count(1)
_batches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have compiled models call a function as it is.

    As `torch.compiler.disable`, which imports torch's compiler where it is called: half of what importing us would
    take, and no use to a model that is not compiled.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined] # what the compiler asks for
    return run


def number_batch(batch: Any, number: torch.Tensor | None) -> torch.Tensor:
    """Have operators find a batch, or a copy of the one with ``number``: (samples,) int64, all the same."""
    if number is None or _number_of(number) in _batches:  # each batch that lives has another one
        number = torch.full((1,), next(_numbers), device="cpu").expand(batch.num_samples)
    _batches[_number_of(number)] = batch
    return number


def number_module(module: Any) -> int:
    """Have operators find a module by the number that is returned."""
    number = next(_numbers)
    _modules[number] = module
    return number


def batch_of(number: torch.Tensor) -> Any:
    """Return the batch with a number."""
    return _batches[_number_of(number)]


def module_of(number: int) -> Any:
    """Return the module with a number."""
    return _modules[number]


def _number_of(number: torch.Tensor) -> int:
    return int(number.as_strided((1,), (1,)))  # of no samples too
