"""``tiercache warmup``: kernels are compiled before they are needed."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["warmup"]


def warmup(
    device: Annotated[str, typer.Option(help="Whose kernels beside the CPU's: cuda, or cuda:1.")] = "cpu",
) -> None:
    """Compile all kernels ahead of the first extraction or training.

    The compiled code is kept on disk, beside the package or in your cache folder, for this version and CPU.
    """
    from tiercache.backends.opening import open_backend
    from tiercache.kernels.cpu.jit import cache_folder
    from tiercache.training.progress import prepare_kernels

    prepare_kernels(narrow=True)
    open_backend(device, ())
    folder = cache_folder()
    if folder is None:
        typer.echo("warning: no cache folder can be written, so each process compiles: set NUMBA_CACHE_DIR", err=True)
    else:
        typer.echo(f"kernels are compiled: {folder}")
