"""Rows that begin as rows of a checkpoint, read from safetensors files by ranges."""

import json
from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import google_crc32c
import numpy as np
import obstore
import pytest
import torch
from obstore.store import MemoryStore
from safetensors.torch import save_file
from zarr.storage import ObjectStore

from tests.apart import ran
from tests.files import flip
from tests.store.checkpoints import DIM, ROWS, TENSOR, save, weights
from tests.store.independent_format import read_record
from tests.store.independent_format import xxh64 as xxhash
from tiercache.planning.capacity import TensorSize, expected_reads
from tiercache.rows.prefetch import first_vectors, initial_vectors, read_vectors
from tiercache.store import CheckpointError, CorruptStoreError, Cursor, Store, StoreFullError, Table, alter
from tiercache.store.checkpoint import CheckpointRecord, CheckpointTensor, eight_bit_values
from tiercache.store.commit import Commit
from tiercache.store.engines.zarr_engine import ZarrEngine
from tiercache.store.initializer import Checkpoint
from tiercache.store.optimizer import SGD
from tiercache.store.row_codec import from_words, initial_rows
from tiercache.store.tensor_file import CHUNK_BYTES, GAP_BYTES, READ_BYTES, TensorFile


def table_of(path: Path, *, dtype: str = "float32", dim: int = DIM, tensor: str = TENSOR, **more: Any) -> Table:
    start = Checkpoint(
        path=str(path), tensor=tensor, scale=more.pop("scale", None), scale_block=more.pop("block", None)
    )
    return Table(name="gram", dim=dim, dtype=dtype, optimizer=SGD(), initializer=start, **more)


def some_keys(count: int = 700, rows: int = ROWS) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(0).permutation(rows)[:count]


def vectors_of(store: Store, keys: Sequence[int]) -> np.ndarray[Any, Any]:
    """Look up vectors of keys that have no row yet."""
    return store.lookup("gram", np.array(keys), missing="initial")["vector"]


def assert_of(found: np.ndarray[Any, Any], tensor: torch.Tensor, keys: Sequence[int]) -> None:
    """Assert that vectors are rows of a tensor."""
    np.testing.assert_array_equal(found, tensor[[*keys]].float().numpy())


def publish(store: Store, pass_index: int = 0) -> Commit:
    return store.publish(Cursor(pass_index), state=b"", schedule_digest="", settings={}, environment={})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_those_of_torch_in_the_dtype_of_the_table(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    """In whichever way they are made, and of a slice of the columns too."""
    tensor = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(stored)
    path, keys = save(tmp_path / "one.safetensors", model__embed__weight=tensor), some_keys()
    expected = tensor[keys].to(getattr(torch, dtype)).float().numpy()
    whole = table_of(path, dtype=dtype)
    part = table_of(path, dtype=dtype, dim=7, first_column=5, whole_dim=DIM)
    for table, columns in ((whole, slice(None)), (part, slice(5, 12))):
        field = table.fields[0]
        np.testing.assert_array_equal(initial_rows(table, keys)[0], expected[:, columns])
        np.testing.assert_array_equal(initial_vectors(table, keys), expected[:, columns])
        words = np.full((keys.size, field.words), np.nan, np.float32)
        first_vectors(table, keys, words)
        np.testing.assert_array_equal(from_words([field], [words])[0], expected[:, columns])
        parts = [np.full((rows, field.words), np.nan, np.float32) for rows in (1, 300, 398, 1)]
        reads = read_vectors(table, keys, parts)
        np.testing.assert_array_equal(np.concatenate(parts), words)
        size = tensor.numel() * tensor.element_size()
        assert reads.requests == 1
        assert size - CHUNK_BYTES < reads.num_bytes <= size


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2")])
@pytest.mark.parametrize(("rows", "columns"), [(128, 8), (1, 20), (1, 1), (2000, 20), (500, 20)])
def test_8_bit_numbers_are_multiplied_by_the_scales_of_their_blocks(
    tmp_path: Path, dtype: torch.dtype, name: str, rows: int, columns: int
) -> None:
    """Blocks of both dimensions, of rows, of all numbers."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(eight_bit_values(name), every)
    values = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    shape = -(-ROWS // rows), -(-DIM // columns)
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5
    path = save(tmp_path / "m.safetensors", model__embed__weight=values, model__embed__weight_scale_inv=scales)
    whole = scales.repeat_interleave(rows, 0)[:ROWS].repeat_interleave(columns, 1)[:, :DIM]
    keys = some_keys()
    block = (rows, columns) if 1 < rows < ROWS else None
    if block is not None:
        with pytest.raises(CheckpointError, match=r"scales for 2000 numbers, and blocks of \d+ or \d+ fit: pass scale"):
            initial_vectors(table_of(path), keys)
    for of_table in ("float32", "bfloat16"):
        expected = (values.float() * whole)[keys].to(getattr(torch, of_table)).float().numpy()
        np.testing.assert_array_equal(initial_vectors(table_of(path, dtype=of_table, block=block), keys), expected)


def test_scales_are_found_by_name_and_refused_where_there_are_none(tmp_path: Path) -> None:
    values = torch.ones(ROWS, DIM).to(torch.float8_e4m3fn)

    def saved(name: str, **tensors: torch.Tensor) -> Path:
        return save(tmp_path / f"{name}.safetensors", **({"model__embed__weight": values} | tensors))

    def refused(table: Table, words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            initial_vectors(table, some_keys())

    rows = saved("rows", mine=torch.full((ROWS,), 2.0))
    np.testing.assert_array_equal(initial_vectors(table_of(rows, scale="mine"), some_keys()), 2.0)
    one = saved("one", mine=torch.tensor(3.0))
    np.testing.assert_array_equal(initial_vectors(table_of(one, scale="mine"), some_keys()), 3.0)
    refused(table_of(rows), "needs the tensor of their scales: pass its name as scale")
    columns = saved("columns", mine=torch.arange(1.0, 1.0 + DIM))  # of columns, not of blocks of 100 rows
    words = "has 20 scales for 2000 numbers, and no block fits: pass scale_block"
    refused(table_of(columns, scale="mine"), words)
    blocks = table_of(columns, scale="mine", block=(100, DIM))
    np.testing.assert_array_equal(initial_vectors(blocks, np.array([0, 100, 1999]))[:, 0], [1, 2, 20])
    refused(table_of(saved("other", model__embed__weight=weights()), scale="mine"), "takes no scale: leave it out")


def test_a_folder_an_index_and_a_file_name_the_same_tensor(tmp_path: Path) -> None:
    tensor, keys = weights(), some_keys()
    save(tmp_path / "model-00001-of-00002.safetensors", other=torch.ones(4))
    file = save(tmp_path / "model-00002-of-00002.safetensors", model__embed__weight=tensor)
    with pytest.raises(CheckpointError, match="has 2 safetensors files but no model"):
        initial_vectors(table_of(tmp_path), keys)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {TENSOR: file.name, "other": "model-00001-of-00002.safetensors"}}))
    for path in (tmp_path, index, file):
        np.testing.assert_array_equal(initial_vectors(table_of(path), keys), tensor[keys].float().numpy())
    with pytest.raises(CheckpointError, match="has no file for tensor 'unknown'"):
        initial_vectors(table_of(index, tensor="unknown"), keys)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        initial_vectors(table_of(index), keys)


def test_far_rows_are_read_apart_and_neighbors_together(tmp_path: Path) -> None:
    """The bytes read are whole chunks, and the gaps that are cheaper to read than to skip."""
    rows = 3 * READ_BYTES // 512
    tensor = torch.arange(rows * 128, dtype=torch.float32).view(rows, 128)
    path = save(tmp_path / "m.safetensors", model__embed__weight=tensor)
    table, in_chunk = table_of(path, dim=128), CHUNK_BYTES // 512
    far = (GAP_BYTES // CHUNK_BYTES + 2) * in_chunk

    def read(*keys: int) -> tuple[int, int]:
        words = np.empty((len(keys), 128), np.float32)
        reads = read_vectors(table, np.array(keys), [words])
        np.testing.assert_array_equal(words, tensor[list(keys)].numpy())
        return reads.num_bytes // CHUNK_BYTES, reads.requests

    assert read(5) == (1, 1)
    assert read(in_chunk + 1, 3) == (2, 1)
    assert read(far, 3, 3) == (2, 2)
    assert read(far - in_chunk, 3) == (far // in_chunk, 1)
    chunks, requests = read(*range(rows))
    assert chunks == rows // in_chunk
    assert requests >= 3


def test_the_estimate_of_reads_agrees_with_reads(tmp_path: Path) -> None:
    rows = 60_000
    path = save(tmp_path / "m.safetensors", model__embed__weight=torch.zeros(rows, 128))
    table = table_of(path, dim=128)
    for count in (10, 300, 3000, 30_000):
        words = np.empty((count, 128), np.float32)
        reads = read_vectors(table, some_keys(count, rows), [words])
        estimate = expected_reads(TensorSize(rows, 512), count)
        assert 0.8 * reads.num_bytes <= estimate.num_bytes <= 1.25 * reads.num_bytes
        assert 0.7 * reads.requests <= estimate.requests <= 1.4 * reads.requests


HEADER_LIES: list[Any] = [
    {"shape": "22"}, {"shape": [2.0, 2]}, {"shape": [True, 4]}, {"shape": [-2, -2]}, {"shape": [0, 4]},
    {"shape": [1 << 62, 1 << 62]}, {"data_offsets": [0]}, {"data_offsets": [0.0, 16]},
    {"data_offsets": {"0": 0, "16": 0}}, {"data_offsets": [16, 32]}, {"dtype": 3}, 5, [], None,
]  # fmt: skip


def test_what_is_no_checkpoint_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.safetensors", model__embed__weight=weights(), flat=torch.ones(5), long=torch.ones(4, 4).long()
    )

    def refused(table: Table, words: str, key: int = 0) -> None:
        with pytest.raises(CheckpointError, match=words):
            initial_vectors(table, np.array([key]))

    refused(table_of(tmp_path / "gone.safetensors"), "gone.safetensors cannot be read .* set its new path")
    refused(table_of(path, tensor="unknown"), "has no tensor 'unknown': it has a, flat, long, model")
    refused(table_of(path, tensor="flat"), r"has shape \[5\]: expected 2 dimensions")
    refused(table_of(path, tensor="long"), "has dtype I64: expected one of F32, BF16, F16")
    refused(table_of(path, dim=DIM + 1), "has 20 columns, but table 'gram' has dim 21")
    for key in (-1, ROWS, 1 << 62):
        refused(table_of(path), f"has key {key}, but .* has 2,000 rows: expected keys from 0 to 1,999", key)
    with pytest.raises(ValueError, match="invalid tensor '' of Checkpoint"):
        Checkpoint(path=str(path), tensor="")
    data, broken = path.read_bytes(), tmp_path / "broken.safetensors"
    for bad in (b"", data[:20], b"\xff" * 100, data[:-1], data[:8] + b"[" + data[9:]):
        broken.write_bytes(bad)
        refused(table_of(broken), "safetensors")
    whole = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    for lie in HEADER_LIES:
        header = json.dumps({TENSOR: whole | lie if isinstance(lie, dict) else lie}).encode()
        broken.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
        refused(table_of(broken, dim=2), "safetensors")


def committed(path: Path, table: Table, engine: str = "lmdb") -> None:
    """Make a store whose rows begin from a checkpoint, look some up, and commit."""
    with Store.open(path, tables=[table], engine=engine) as store:
        vectors_of(store, range(5, 40))
        publish(store)


@pytest.mark.parametrize("engine", ["lmdb", "zarr"])
class TestAStoreRefusesAnotherFile:
    """Than the one that it first read."""

    def test_of_other_numbers_size_or_header(self, tmp_path: Path, engine: str) -> None:
        """As soon as a chunk is read again; by ``check_checkpoints`` at once."""
        path, tensor = tmp_path / "m.safetensors", weights()
        save(path, model__embed__weight=tensor)
        committed(tmp_path / "store", table_of(path), engine)
        tensor[17] += 1
        save(path, model__embed__weight=tensor)
        with Store.open(tmp_path / "store", mode="r") as store:
            with pytest.raises(CheckpointError, match=r"has different bytes at .* than when the store first read it"):
                vectors_of(store, [300])
            with pytest.raises(CheckpointError, match="has different bytes at"):
                store.check_checkpoints()
        save(path, model__embed__weight=weights(), more=torch.ones(1))
        refused = pytest.raises(CheckpointError, match="is not the one that table 'gram' started from")
        with Store.open(tmp_path / "store", mode="r") as store, refused:
            vectors_of(store, [3])
        save(path, model__embed__weight=weights())
        with Store.open(tmp_path / "store", mode="r") as store:
            assert_of(vectors_of(store, [300]), weights(), [300])

    def test_changed_while_it_is_open(self, tmp_path: Path, engine: str) -> None:
        path = save(tmp_path / "m.safetensors", model__embed__weight=weights())
        with Store.open(tmp_path / "store", tables=[table_of(path)], engine=engine) as store:
            vectors_of(store, [3])
            save(tmp_path / "other.safetensors", model__embed__weight=weights(seed=1)).replace(path)
            with pytest.raises(CheckpointError, match="was changed or replaced while it was in use"):
                vectors_of(store, [4])
            path.unlink()
            with pytest.raises(CheckpointError, match=r"cannot be read .* restore the file"):
                vectors_of(store, [4])

    def test_moved_to_a_place_that_alter_names(self, tmp_path: Path, engine: str) -> None:
        """And takes it there, if it is the same."""
        path, new = save(tmp_path / "m.safetensors", model__embed__weight=weights()), tmp_path / "new.safetensors"
        committed(tmp_path / "store", table_of(path), engine)
        path.rename(new)
        with Store.open(tmp_path / "store") as store:
            alter(store, [table_of(new)])
            assert_of(vectors_of(store, [300]), weights(), [300])
        save(new, model__embed__weight=weights(seed=1))
        with Store.open(tmp_path / "store", mode="r") as store, pytest.raises(CheckpointError, match="different bytes"):
            vectors_of(store, [300])


def test_a_store_on_an_object_store_refuses_another_file_too(tmp_path: Path) -> None:
    path, objects = save(tmp_path / "m.safetensors", model__embed__weight=weights()), ObjectStore(MemoryStore())

    def reader() -> Store:
        return Store.open(None, mode="r", engine=ZarrEngine(objects, create=False, readonly=True))

    with Store.open(None, tables=[table_of(path)], engine=ZarrEngine(objects, create=True)) as store:
        vectors_of(store, range(5, 40))
        publish(store)
    name = f"checkpoint-{table_of(path).table_id:016x}-{xxhash(TENSOR.encode() + bytes(1)):016x}"
    assert name in {str(entry["path"]) for page in obstore.list(objects.store) for entry in page}
    save(path, model__embed__weight=weights(seed=1))
    with reader() as store:
        with pytest.raises(CheckpointError, match="has different bytes at"):
            vectors_of(store, [300])
        with pytest.raises(CheckpointError, match="has different bytes at"):
            store.check_checkpoints()
    save(path, model__embed__weight=weights(), more=torch.ones(1))
    message = "is not the one that table 'gram' started from.* delete object 'checkpoint-.* of the store in"
    with reader() as store, pytest.raises(CheckpointError, match=message):
        vectors_of(store, [300])
    obstore.put(objects.store, name, b"no record")
    with pytest.raises(CorruptStoreError, match="checkpoint-"):
        reader()


def test_alter_takes_another_tensor_of_the_same_dim(tmp_path: Path) -> None:
    """One that does not fit is refused, and makes no commit."""
    other = weights(seed=1)
    path = save(tmp_path / "m.safetensors", model__embed__weight=weights(), other=other, wide=weights(dim=DIM + 1))
    committed(tmp_path / "store", table_of(path))
    with Store.open(tmp_path / "store") as store:
        for table, message in (
            (table_of(path, tensor="wide"), r"has 21 columns, but table 'gram' has dim 20"),
            (table_of(tmp_path / "gone.safetensors"), "cannot be read"),
        ):
            with pytest.raises(CheckpointError, match=message):
                alter(store, [table])
        assert store.commit.id == 0
        alter(store, [table_of(path, tensor="other")])
        assert_of(vectors_of(store, [300]), other, [300])
        publish(store)
    assert len([*(tmp_path / "store").glob("checkpoint-*")]) == 2


def test_a_read_meets_no_record_that_another_thread_just_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, goes_on = save(tmp_path / "m.safetensors", model__embed__weight=weights()), Event()
    committed(tmp_path / "store", table_of(path))
    check, know, found = TensorFile.check_unchanged, CheckpointRecord.know, []

    def wait_first(self: TensorFile) -> None:
        if current_thread() is reader:
            goes_on.wait(60)
        check(self)

    def know_after_the_read(self: CheckpointRecord, tensor: CheckpointTensor) -> None:
        goes_on.set()
        reader.join(60)
        know(self, tensor)

    reader = Thread(target=lambda: found.append(initial_vectors(table_of(path), np.array([300]))))
    with Store.open(tmp_path / "store", mode="r") as store:
        vectors_of(store, [5])
        monkeypatch.setattr(TensorFile, "check_unchanged", wait_first)
        monkeypatch.setattr(CheckpointRecord, "know", know_after_the_read)
        reader.start()
        Store.open(tmp_path / "new", tables=[table_of(path)]).close()
    assert_of(found[0], weights(), [300])


def test_a_record_keeps_what_another_process_added(tmp_path: Path) -> None:
    """``verify --checkpoints`` beside a training; and a training does not undo it."""
    path, tensor = tmp_path / "m.safetensors", weights(20_000)
    save_file({TENSOR: tensor}, path)
    committed(tmp_path / "store", table_of(path))
    with Store.open(tmp_path / "store") as store:
        vectors_of(store, [19_999])
        (record,) = store.checkpoints.values()
        assert not record.sums[0].known_C.all()
        code = (
            "import sys; from tiercache.store import Store\nwith Store.open(sys.argv[1], mode='r') as store:\n"
            "    (record,) = store.checkpoints.values(); record.check_all(); record.save()"
        )
        assert ran(code, tmp_path / "store").returncode == 0
        publish(store, 1)
    with Store.open(tmp_path / "store", mode="r") as store:
        (record,) = store.checkpoints.values()
        assert record.sums[0].known_C.all()
    tensor[-1] += 1
    save_file({TENSOR: tensor}, path)
    with Store.open(tmp_path / "store", mode="r") as store, pytest.raises(CheckpointError, match="different bytes"):
        vectors_of(store, [19_999])


@pytest.mark.parametrize("value", [1e39, 70_000.0])
def test_a_number_beyond_the_dtype_of_the_table_is_refused(tmp_path: Path, value: float) -> None:
    """Not an infinity that trains. What was infinite stays so."""
    dtype = "float16" if value < 1e38 else "bfloat16"
    tensor = weights().float()
    tensor[7, 3], tensor[8, 3] = (value if value < 1e38 else torch.finfo(torch.float32).max), torch.inf
    path = save(tmp_path / "m.safetensors", model__embed__weight=tensor)
    message = f"row 7 of .* has a number that is infinite in {dtype}: choose another dtype for table 'gram'"
    with pytest.raises(CheckpointError, match=message):
        initial_vectors(table_of(path, dtype=dtype), np.array([3, 7]))
    assert initial_vectors(table_of(path, dtype=dtype), np.array([3, 8]))[1, 3] == np.inf


def test_a_full_disk_fails_the_commit_and_not_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next commit writes the record."""
    path = save(tmp_path / "m.safetensors", model__embed__weight=weights())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with Store.open(tmp_path / "store", tables=[table_of(path)]) as store:
        vectors_of(store, range(5))
        monkeypatch.setattr("tiercache.store.files.replace_file", full)
        with pytest.raises(StoreFullError):
            publish(store)
        monkeypatch.undo()
        assert store.commit is None
        assert publish(store).id == 0
    assert [*(tmp_path / "store").glob("checkpoint-*")]


def test_the_record_is_what_the_format_says(tmp_path: Path) -> None:
    path, tensor = tmp_path / "m.safetensors", weights(20_000)
    save_file({TENSOR: tensor}, path)
    committed(tmp_path / "store", table_of(path))
    (file,) = (tmp_path / "store").glob("checkpoint-*")
    assert file.name == f"checkpoint-{table_of(path).table_id:016x}-{xxhash(TENSOR.encode() + bytes(1)):016x}"
    values, arrays = read_record("checkpoint", file.read_bytes())
    data = path.read_bytes()
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    chunks = -(-tensor.numel() * 2 // 16384)
    assert values == {
        "table": "gram", "tensor": TENSOR, "chunk_bytes": 16384,
        "files": [[len(data), sha256(header).hexdigest(), chunks]],
    }  # fmt: skip
    known = np.unpackbits(arrays["known0"].view(np.uint8))[:chunks]
    assert known.tolist() == [1] + [0] * (chunks - 1)
    first = data[8 + len(header) :][:16384]
    assert arrays["crc0"].tolist() == [google_crc32c.value(first)] + [0] * (chunks - 1)
    flip(file, file.stat().st_size // 2)
    with pytest.raises(CorruptStoreError, match="checkpoint-"):
        Store.open(tmp_path / "store", mode="r")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_tensor_that_is_cut_into_files_is_one(tmp_path: Path, stored: torch.dtype) -> None:
    """By numbers and not by names: part 10 comes after part 9."""
    tensor, cuts = weights(1100).to(stored), np.linspace(0, 1100, 12).astype(int)
    scales, files, names = torch.linspace(0.5, 2, 11), [], {}
    for number, (low, high) in enumerate(pairwise(cuts)):
        tensors = {f"t.{number}.w": tensor[low:high].contiguous()}
        if stored.itemsize == 1:
            tensors[f"t.{number}.w_scale_inv"] = scales[number]
        files.append(tmp_path / f"file-{number % 3}.safetensors")
        names |= dict.fromkeys(tensors, (files[-1].name, tensors))
    for file in set(files):
        save_file({name: tensors[name] for name, (of, tensors) in names.items() if of == file.name}, file)
    index = {"weight_map": {name: of for name, (of, _) in names.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = tensor.float()
    if stored.itemsize == 1:
        expected *= scales.repeat_interleave(torch.from_numpy(np.diff(cuts)))[:, None]
    keys, table = some_keys(600, 1100), table_of(tmp_path, tensor="t.*.w")
    np.testing.assert_array_equal(initial_vectors(table, keys), expected[keys].numpy())
    committed(tmp_path / "store", table)
    with Store.open(tmp_path / "store", mode="r") as store:
        assert_of(vectors_of(store, keys), expected, keys)
        (record,) = store.checkpoints.values()
        assert record.check_all() == sum(file.size for file in record._tensor.files)
    with pytest.raises(CheckpointError, match=r"has key 1100, but .* has 1,100 rows"):
        initial_vectors(table, np.array([1100]))
    with pytest.raises(CheckpointError, match=r"with the numbers \[\]: expected 0, 1, and so on"):
        initial_vectors(table_of(tmp_path, tensor="u.*.w"), keys)
