"""Records of a store with changed content, under correct digests from there up to the head."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.store.damage import plant, records_of
from tiercache.store.engines.engine import Blob, Engine
from tiercache.store.records import decode, digest, encode
from tiercache.store.segment import GroupMeta, Segment, meta_to_bytes
from tiercache.store.store import Store

Change = Callable[[dict[str, Any], dict[str, NDArray[Any]]], object]
"""Changes the values and the arrays of a record, in place."""


def rewritten(engine: Engine, kind: str, change: Change) -> None:
    """Change the record of the newest commit (``kind`` "commit"), or its rank list ("rank")."""
    records, head = records_of(engine), engine.newest()
    assert head is not None
    name = head.name
    if kind == "rank":
        name = decode("commit", records[name], name)[0]["ranks"][0][0]
    values, arrays = decode(kind, records[name], name)
    arrays = {array: numbers.copy() for array, numbers in arrays.items()}
    change(values, arrays)
    plant(engine, name, encode(kind, values, arrays))


def described(engine: Engine, store: Store, segment: Segment, meta: Sequence[GroupMeta]) -> None:
    """Change the metadata of one segment of the newest commit."""
    head, parts = meta_to_bytes(meta, segment.id, store.groups)
    data, name = np.concatenate([np.frombuffer(head, np.uint8), *parts]), segment.meta_blob.name
    engine.drop([(name, None)])
    engine.put([Blob(name, data.size)], [(0, 0, data)])

    def change(values: dict[str, Any], _: object) -> None:
        entry = next(entry for entry in values["segments"] if entry[0] == segment.id)
        entry[-3:] = [data.size, len(head), digest(head)]

    rewritten(engine, "rank", change)
