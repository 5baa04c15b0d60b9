"""Compiled models: numbers by which operators find batches and modules, and functions that are not compiled."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from tiercache.values.torch_internals import frame_callback

if TYPE_CHECKING:
    from collections.abc import Callable

_numbers = itertools.count(1)
_batches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_modules: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def not_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have compiled models call a function without compiling it.

    Unlike `torch.compiler.disable`, this imports torch's compiler only for a compiled model: half of our import time.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if frame_callback() is None:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined] # what the compiler asks for
    return run


def number_batch(batch: Any, number: torch.Tensor | None) -> torch.Tensor:
    """Register a batch, or a copy of the one with ``number``, and return its number: (samples,) int64, all equal."""
    if number is None or _number_of(number) in _batches:  # live batches have different numbers
        number = torch.full((1,), next(_numbers), device="cpu").expand(batch.num_samples)
    _batches[_number_of(number)] = batch
    return number


def number_module(module: Any) -> int:
    """Register a module and return its number."""
    number = next(_numbers)
    _modules[number] = module
    return number


def batch_of(number: torch.Tensor) -> Any:
    """Return the batch with a number."""
    return _batches[_number_of(number)]


def module_of(number: int) -> Any:
    """Return the module with a number."""
    return _modules[number]


def known_module(number: int) -> Any:
    """Return the module with a number; None if it is gone."""
    return _modules.get(number)


def _number_of(number: torch.Tensor) -> int:
    return int(number.as_strided((1,), (1,)))  # even without samples
