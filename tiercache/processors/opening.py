"""A processor by the name of its device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tiercache.processors.cpu_processor import CpuProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiercache.processors.processor import Processor
    from tiercache.store.table import Table


def open_processor(device: str | Processor, tables: Sequence[Table]) -> Processor:
    """Return the processor of ``device``, "cpu", "cuda" or "cuda:1", ready to train ``tables``; one given is taken.

    Nothing of CUDA is imported before it is asked for. Raises CudaError where a GPU cannot be used, ValueError for
    another device.
    """
    processor: Processor
    if not isinstance(device, str):
        processor = device
    elif device == "cpu":
        processor = CpuProcessor()
    elif found := re.fullmatch(r"cuda(?::(\d+))?", device):
        from tiercache.processors.cuda_processor import CudaProcessor
        from tiercache.processors.gpu import open_gpu

        processor = CudaProcessor(open_gpu(None if found[1] is None else int(found[1])))
    else:
        raise ValueError(f"device is {device!r}: it must be 'cpu', 'cuda', or one of several GPUs as in 'cuda:1'")
    processor.prepare(tables)
    return processor
