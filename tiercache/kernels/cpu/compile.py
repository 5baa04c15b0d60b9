"""Compile every kernel before it is needed, with progress.

The types are those of the kernels' annotations. Kernels that read or step rows are compiled for 16-bit dtypes, too,
where a table has such a dtype. The compiled code is kept on disk, next to the package or in the user's cache, until a
source file changes.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

from tiercache.kernels.cpu.jit import KERNELS, Kernel, threads

for _path in sorted(Path(__file__).parent.glob("[!_]*.py")):
    if _path != Path(__file__):
        importlib.import_module(f"tiercache.kernels.cpu.{_path.stem}")

_FOUND: set[bool] = set()
"""For which `narrow` all kernels were found: looking takes 50 files, and what is compiled stays so."""


def _needed(*, narrow: bool) -> list[tuple[Kernel, bool]]:
    """Return every kernel that this machine has, then again those for 16-bit dtypes."""
    kernels = [kernel for kernel in KERNELS if kernel.is_available()]
    also = [(kernel, True) for kernel in kernels if kernel.has_narrow] if narrow else []
    return [*((kernel, False) for kernel in kernels), *also]


def is_cached(*, narrow: bool = False) -> bool:
    """Return True if every kernel is compiled, in memory or on disk: if not, `prepare` takes up to a minute.

    `narrow`: also those for 16-bit dtypes.
    """
    if narrow not in _FOUND:
        if not all(kernel.is_compiled(narrow=is_narrow) for kernel, is_narrow in _needed(narrow=narrow)):
            return False
        _FOUND.add(narrow)
    return True


def prepare(notify: Callable[[str, int, int], None] | None = None, *, narrow: bool = False) -> None:
    """Compile every kernel, or load it from disk; `narrow`: also those for 16-bit dtypes.

    `notify` is called with the next kernel, the number done and the total, and once at the end.
    Call it on the training thread: it starts the threads of parallel kernels.
    """
    threads()
    needed = _needed(narrow=narrow)
    for done, (kernel, is_narrow) in enumerate(needed):
        if notify is not None:
            notify(kernel.name.strip("_").replace("_", " "), done, len(needed))
        kernel.compile(narrow=is_narrow)
    if notify is not None:
        notify("done", len(needed), len(needed))
