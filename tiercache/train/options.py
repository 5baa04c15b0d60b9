"""TierCacheOptions: arguments of TierCache that are rarely changed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from tiercache.train.commit_state import NONFINITE_MODES

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Sequence

    from torch.distributed import ProcessGroup

COMM_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCacheOptions:
    """Settings of a `TierCache` that are rarely changed. Raises ValueError for an unknown value."""

    group: ProcessGroup | None = None
    """The process group to train on. Default: torch's default group if there is one, else this process alone.

    The cache creates its own process groups from it.
    """
    comm_dtype: str = "float32"
    """The dtype in which rows and gradients travel between ranks: "float32", "bfloat16" or "float16"."""
    shard_dirs: Sequence[str | os.PathLike[str]] | None = None
    """A folder for each rank's shard, for example on different disks; default: inside the store's folder."""
    engine: str | None = None
    """See ``Store.open``; used if the cache opens the store."""
    reorganize: bool = True
    """Reorganize a store of another dataset or order first, as `tiercache.reorganize` does; if False, refuse it."""
    on_nonfinite: str = "stop"
    """The reaction to rows, optimizer states or trainable dense parameters that become NaN or infinite.

    "stop" raises StateError, which names the pass and table, on a CPU also the batch, and does not commit them; "warn"
    warns once for each pass; "ignore" checks nothing.
    """

    def __post_init__(self) -> None:
        for name, allowed in (("comm_dtype", COMM_DTYPES), ("on_nonfinite", NONFINITE_MODES)):
            if (word := getattr(self, name)) not in allowed:
                raise ValueError(f"unknown {name} {word!r}: expected one of {', '.join(map(repr, allowed))}")


def refuse_moved(arguments: Collection[str]) -> None:
    """Raise TypeError for unknown arguments of a cache; for fields of the options, say where they belong."""
    for name in arguments:
        if name in {field.name for field in fields(TierCacheOptions)}:
            raise TypeError(
                f"{name} is not an argument of a cache but a field of its options: pass "
                f"options=tc.TierCacheOptions({name}=...)"
            )
        raise TypeError(f"TierCache() got an unexpected keyword argument {name!r}")
