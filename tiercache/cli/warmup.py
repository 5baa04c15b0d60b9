"""``tiercache warmup``: kernels are compiled before they are needed."""

from __future__ import annotations

import contextlib
import io
from typing import Annotated

import typer

from tiercache.cli.output import Json, Output, Quiet


def warmup(
    device: Annotated[str, typer.Option(help="Also compile the kernels of this device: cuda, or cuda:1.")] = "cpu",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compile all kernels ahead of the first extraction or training.

    The compiled code is kept on disk, beside the package or in your cache folder, for this version and CPU.
    """
    from tiercache.backends.opening import open_backend
    from tiercache.kernels.cpu.jit import cache_folder
    from tiercache.training.progress import prepare_kernels

    output = Output(as_json, quiet)
    with contextlib.nullcontext() if output.is_text else contextlib.redirect_stderr(io.StringIO()):
        prepare_kernels(narrow=True)
        open_backend(device, ())
    folder = cache_folder()
    if folder is None and not quiet:
        typer.echo("warning: no cache folder can be written, so each process compiles: set NUMBA_CACHE_DIR", err=True)
    text = f"kernels are compiled: {folder}" if folder else "kernels are compiled for this process"
    output.result({"cache_folder": None if folder is None else str(folder)}, text)
