"""A commit's record of its ranks: damage and lies are refused with an error message, and never trained."""

import json
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from tests.dist.sharded_world import TABLES, check_shards, sentences, train_on, train_shards
from tests.files import files_of
from tests.store.damage import DEEP, assert_sentence, damaged, generator_of, lie, plant, records_of
from tests.store.damage import opened as opened_record
from tests.store.damage import sealed as sealed_record
from tiercache.store import CorruptStoreError, Cursor, NotAStoreError, Store, StoreError
from tiercache.store.commit import CommitRecord
from tiercache.store.opening import open_folder
from tiercache.store.rank_folder import RankFolder, store_id

ENGINES = pytest.mark.parametrize("engine", ["lmdb", "zarr"])
FIELDS = ("ranks", "folders", "sharding")


def whole_engine(path: Path, rank: int, engine: str) -> Any:
    return open_folder(path / f"rank-{rank}" if rank else path, TABLES, engine, "a", None, create=False).engine


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("ranks")
    path = folder / "s"
    train_on(path, 3, 4, retention=2, shard_dirs=[path, path, folder / "disk ü"])
    engine = whole_engine(path, 0, "lmdb")
    name = engine.newest().name
    found: bytes = records_of(engine)[name]
    engine.close()
    return found


def changed(record: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    header, arrays = opened_record(record)
    change(header["values"])
    return sealed_record(json.dumps(header).encode(), arrays)


def put(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        *way, key = path
        part: Any = values
        for step in way:
            part = part[step]
        part[key] = to

    return change


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        for name in names:
            del values[name]

    return change


LIES = [
    (without("sharding"), "it has 3 ranks and no sharding"),
    (without("folders"), "'folders'"),
    (without("ranks"), "'ranks'"),
    (put("ranks", to=[]), "it has 0 ranks, 3 folders and a sharding for 3"),
    (lambda values: values["ranks"].pop(), "it has 2 ranks, 3 folders and a sharding for 3"),
    (lambda values: values["folders"].pop(), "it has 3 ranks, 2 folders and a sharding for 3"),
    (put("folders", to=[]), "it has 3 ranks, 0 folders and a sharding for 3"),
    (put("folders", to=7), "not iterable"),
    (put("folders", to=[".", 1, "rank-2"]), "cannot be read"),
    (put("folders", 0, to="rank-0"), "'rank-0' is not a folder of rank 0"),
    (put("folders", 1, to="rank-2"), "'rank-2' is not a folder of rank 1"),
    (put("folders", 1, to=".."), r"'\.\.' is not a folder of rank 1"),
    (put("folders", 1, to="../rank-1"), r"'\.\./rank-1' is not a folder of rank 1"),
    (put("folders", 1, to="a/rank-1"), "'a/rank-1' is not a folder of rank 1"),
    (put("folders", 1, to="/a/../rank-1"), r"'/a/\.\./rank-1' is not a folder of rank 1"),
    (put("folders", 1, to="/etc"), "'/etc' is not a folder of rank 1"),
    (put("folders", 1, to="/a\n/rank-1"), "is not a folder of rank 1"),
    (put("sharding", to=[]), r"a sharding plan's record is \[\]"),
    (put("sharding", to={}), "a sharding plan's record"),
    (put("sharding", "num_ranks", to=4), "it has 3 ranks, 3 folders and a sharding for 4"),
    (put("sharding", "num_ranks", to=0), "expected a whole number >= 1"),
    (put("sharding", "tables", to={}), "the sharding is of other tables"),
    (put("sharding", "tables", "item", to={"kind": "rows"}), "the sharding of table 'item' is 'rows'"),
    (put("sharding", "tables", "day", "slices", to=[[2, 0, 2]]), "the sharding of table 'day'"),
    (put("sharding", "tables", "day", "slices", to=[[3, 0, 3]]), "the sharding of table 'day'|rank"),
    (put("sharding", "tables", "word", "slices", to=[[0, 0, 2], [1, 3, 5]]), "the sharding of table 'word'"),
    (put("ranks", 1, to=["ranks/1.3", 7]), "cannot be read"),
    (put("ranks", 1, 1, to=-1), "cannot be read"),
    (put("ranks", 1, 2, to="x"), "cannot be read"),
    (put("stored", to=[[]]), "tables of before an alteration|cannot be read"),
]
"""Changes of a record, and the resulting messages."""


@pytest.mark.parametrize(("change", "words"), LIES, ids=range(len(LIES)))
def test_a_record_that_makes_no_sense_is_one_error(record: bytes, change: Callable[..., None], words: str) -> None:
    with pytest.raises(CorruptStoreError, match=words) as caught:
        CommitRecord.from_bytes(changed(record, change), "it")
    assert "\n" not in str(caught.value)
    assert "it cannot be read" in str(caught.value)
    assert ": restore the store from a copy" in str(caught.value)


def test_records_of_any_ranks_are_refused_in_a_sentence(record: bytes) -> None:
    """Damaged records, and false values of its three fields under a right checksum; accepted ones read back equal."""
    refused = 0
    for seed in range(1500):
        generator = generator_of(seed)
        if seed % 3 == 0:
            data = damaged(record, generator)
        else:
            values = {name: opened_record(record)[0]["values"][name] for name in FIELDS}
            for _ in range(int(generator.integers(1, 3))):
                lie(values, generator)
            data = changed(record, lambda all_values, of=values: (without(*FIELDS)(all_values), all_values.update(of)))
        try:
            found = CommitRecord.from_bytes(data, "it")
        except StoreError as error:
            assert_sentence(error)
            refused += 1
        else:
            sharding = found.sharding
            assert sharding is None or len(found.ranks) == len(found.folders) == sharding.num_ranks
            for rank, folder in enumerate(found.folders):
                assert folder == "." if rank == 0 else Path(folder).name == f"rank-{rank}"
                assert ".." not in folder.split("/")
    assert refused > 1200
    with pytest.raises(CorruptStoreError):
        CommitRecord.from_bytes(DEEP, "it")
    body = b"TCR1" + struct.pack("<I", len(DEEP)) + DEEP
    with pytest.raises(CorruptStoreError):
        CommitRecord.from_bytes(body + struct.pack("<I", google_crc32c.value(body)), "it")


def planted(path: Path, engine: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the newest commit, with right digests, as a writer would have written it."""
    opened = whole_engine(path, 0, engine)
    try:
        name = opened.newest().name
        plant(opened, name, changed(records_of(opened)[name], change))
    finally:
        opened.close()


def _swap(values: dict[str, Any]) -> None:
    values["ranks"][1], values["ranks"][2] = values["ranks"][2], values["ranks"][1]


@pytest.mark.sampled(10)
@ENGINES
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_swap, r"ranks/2\.3.* of the store at .*: restore"),
        (lambda values: put("ranks", 1, to=values["ranks"][2])(values), r"ranks/2\.3.*: restore"),
        (lambda values: put("ranks", 0, to=values["ranks"][1])(values), r"ranks/1\.3.*: restore"),
        (put("ranks", 1, 2, to="a" * 64), r"ranks/1\.3.* is not what was written: restore"),
        (put("ranks", 1, 1, to=1), r"ranks/1\.3.*: restore"),
        (put("ranks", 1, 1, to=1 << 40), r"ranks/1\.3.*: restore"),
        (put("ranks", 1, 0, to="ranks/1.99"), r"ranks/1\.99.*: restore"),
        (put("ranks", 1, 0, to="commits/3"), r"commits/3.*: restore"),
        (put("folders", 2, to="/etc/rank-1"), "'/etc/rank-1' is not a folder of rank 2.*: restore"),
        (
            put("sharding", "tables", "item", to={"kind": "table_wise", "slices": [[1, 0, 7]]}),
            "the sharding of table 'item' has 7 columns, but the table has 8.*: restore",
        ),
    ],
    ids=range(10),
)
def test_a_commit_whose_ranks_are_others_is_not_trained(
    tmp_path: Path, engine: str, change: Callable[..., None], words: str
) -> None:
    path = tmp_path / "s"
    train_on(path, 3, 4, engine=engine)
    planted(path, engine, change)
    held = blobs_of(path)
    errors = train_shards(path, 3, 1)
    assert any(isinstance(error, CorruptStoreError) for error in errors), errors
    assert_refused(sentences(errors), words)
    for mode in ("r", "a"):
        with pytest.raises(CorruptStoreError) as caught:
            Store.open(path, mode=mode)
        assert_refused(str(caught.value), words)
    assert blobs_of(path) == held


@ENGINES
def test_a_sharding_that_the_lists_of_ranks_do_not_fit_is_refused(tmp_path: Path, engine: str) -> None:
    """The tables of ranks would have other columns: such rows are neither trained nor read."""
    path = tmp_path / "s"
    train_on(path, 3, 4, engine=engine)
    planted(path, engine, put("sharding", "tables", "word", to={"kind": "row_wise"}))
    held = blobs_of(path)
    assert "has a different sharding" in sentences(train_shards(path, 3, 1))
    with pytest.raises(CorruptStoreError) as caught, Store.open(path, mode="r") as store:
        list(store.scan("word"))
    assert_sentence(caught.value)
    assert blobs_of(path) == held


def assert_refused(sentence: str, words: str) -> None:
    assert re.search(words, sentence), sentence
    assert "\n" not in sentence


def blobs_of(path: Path) -> dict[str, bytes]:
    """Return the files of a store except those that each opening for writing changes: locks and engines' heads."""
    return {
        name: data for name, data in files_of(path).items()
        if not name.endswith((".lock", "HEAD")) and "heads" not in name
    }  # fmt: skip


# -- the markers of ranks' folders -----------------------------------------------------------------------------


def test_markers_of_any_bytes_are_refused_in_a_sentence(tmp_path: Path) -> None:
    """Nothing is deleted in a folder without a marker, or with another store's or rank's."""
    path = tmp_path / "s"
    train_on(path, 2, 2)
    folder, marker, id_ = path / "rank-1", path / "rank-1" / "store.json", store_id(path)
    (folder / "rows").touch()
    written = marker.read_bytes()
    whole = json.loads(written)
    for seed in range(300):
        data = damaged(written, generator_of(seed))
        marker.write_bytes(data)
        try:
            RankFolder(path, "rank-1", 1, id_).check()
        except StoreError as error:
            assert_sentence(error)
        else:
            assert json_of(data) == whole
        if json_of(data) != whole:
            RankFolder(path, "rank-1", 1, id_).delete()
            assert (folder / "rows").exists()
            with pytest.raises(NotAStoreError, match="exists and is not a rank of this store"):
                RankFolder(path, "rank-1", 1, id_).make("lmdb")
            assert (folder / "rows").exists()
    for other in (RankFolder(path, "rank-1", 1, "ab" * 16), RankFolder(path, "rank-1", 2, id_)):
        marker.write_bytes(written)
        other.delete()
        assert (folder / "rows").exists()
    marker.unlink()
    RankFolder(path, "rank-1", 1, id_).delete()
    assert (folder / "rows").exists()
    marker.write_bytes(written)
    RankFolder(path, "rank-1", 1, id_).delete()
    RankFolder(path, "rank-1", 1, id_).delete()
    assert not folder.exists()


def test_a_rank_is_deleted_by_several_at_once_and_whatever_is_made_there_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "s"
    train_on(path, 2, 2)
    place = RankFolder(path, str(tmp_path / "disk" / "rank-1"), 1, store_id(path))

    def disturb() -> None:
        for _ in range(20):
            with suppress(OSError):
                (place.path / "leases").mkdir(exist_ok=True)
                (place.path / "leases" / "7").touch()
                (place.path / "leases" / "7").unlink()

    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            place.make("lmdb")
            for name in ("data.mdb", "blocks/1", "blocks/2"):
                (place.path / name).parent.mkdir(exist_ok=True)
                (place.path / name).touch()
            for done in [pool.submit(work) for work in (disturb, *[place.delete] * 3)]:
                done.result()
    place.delete()
    assert not (place.path / "data.mdb").exists()
    assert not (place.path / "store.json").exists()
    check_shards(path, Cursor(1))


def json_of(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
