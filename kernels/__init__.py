"""Array kernels for the CPU: arrays in, arrays out, no state. Those of a CUDA device are in the modules `cuda_*`.

Names are loaded when they are first used, for importing numba takes a second.
"""

import importlib
from typing import Any

_HOME = {
    "CONSTANT": "initial",
    "MAX": "pooling",
    "MEAN": "pooling",
    "NORMAL": "initial",
    "SUM": "pooling",
    "UNIFORM": "initial",
    "ZEROS": "initial",
    "CudaDevice": "cuda",
    "CudaError": "cuda",
    "Gradients": "gradients",
    "KeyIndex": "key_index",
    "KeyNumbers": "numbering",
    "KeySet": "key_index",
    "NoGpuError": "cuda",
    "SortBuffers": "sorting",
    "UpdateBuffers": "update",
    "bag_gradients": "gradients",
    "bucket_ids": "bucketing",
    "bucket_keys": "bucketing",
    "can_spread": "gathering",
    "check_ids": "gathering",
    "crc32c": "checksum",
    "gather": "gathering",
    "has_crc32c": "checksum",
    "has_reads": "file_io",
    "hash_keys": "bits",
    "hash_range_bound": "uses",
    "initial_rows": "initial",
    "is_cached": "compile",
    "key_owners": "bucketing",
    "map_slots": "gathering",
    "mix": "bits",
    "one_id_gradients": "gradients",
    "open_device": "cuda",
    "pack": "rows",
    "philox4x32": "initial",
    "pool_bags": "pooling",
    "pool_one": "gathering",
    "prepare": "compile",
    "read_checked": "file_io",
    "read_fields": "field_io",
    "search_keys": "uses",
    "set_threads": "jit",
    "sort_slots": "sorting",
    "spread_one": "gathering",
    "sweep_uses": "uses",
    "threads": "jit",
    "unpack": "rows",
    "update_adagrad": "update",
    "update_adam": "update",
    "update_rowwise_adagrad": "update",
    "update_sgd": "update",
    "weight_gradient": "pooling",
    "xxh64": "bits",
    "xxh64_strings": "bits",
    "xxh64_words": "bits",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the names of the table above


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"tiercache.kernels.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
