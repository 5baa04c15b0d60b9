"""The private parts of torch that this package calls. A new release of torch is tried with `make test`, then allowed.

Besides these, `train/joint_optimizer.py` reads the hooks that `torch.optim.Optimizer` keeps, `values/compiled.py` sets
the mark by which the compiler skips a function, and `dist/communicator.py` the timeouts of process groups.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the running backward pass, -1 if none runs."""
is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Return True if a profiler is running."""
is_in_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""Return something else than None inside a transform of torch.func, such as vmap or grad."""
below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowADInplaceOrView
"""Return a context in which views are not noted by autograd: each may be changed in place."""
without_subclasses: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
"""Return a context in which subclasses of tensors change no function."""
frame_callback: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: sys.modules.get("torch._dynamo")
)
"""Return something else than None if the compiler may compile functions that are called now."""
unscale: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply gradients by a GradScaler's inverse scale, and note if any is not finite."""


def is_of_transform(tensor: torch.Tensor) -> bool:
    """Return True for a tensor that a transform has wrapped; ``is_grads_batched`` uses an older kind."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def current_stream(device: int) -> int:
    """Return the address of the current stream of a GPU, ten times as fast as by a `Stream`."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def storage_uses(tensor: torch.Tensor) -> int:
    """Return the number of tensors, this one among them, that use its memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # the storage's own object


def refused_by(error: Exception) -> str:
    """Return what an error of ``torch.load(weights_only=True)`` says of a file, in words; its advice is to trust it."""
    named = re.search(r"GLOBAL ([\w.]+)", str(error))
    return f"it names {named[1]}" if named else "it cannot be unpickled"


def after_backward(call: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended, after those that were queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """Return the flags of a scaler, one a device, that are not 0 if a gradient of the optimizer overflowed."""
    return scaler._found_inf_per_device(optimizer).values()
