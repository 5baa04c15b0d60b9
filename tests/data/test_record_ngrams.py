"""record_ngrams: key sets of the n-grams of token files, cut at the device budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import tiercache as tc
from tests.files import files_of
from tiercache.errors import BudgetError, DatasetError, ExtractionError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOCAB, LENGTH, BUDGET = 50, 16, "90KiB"
TABLE = tc.Table(
    name="gram", dim=8, optimizer=tc.optim.Adagrad(learning_rate=0.1, eps=1e-10), initializer=tc.init.Zeros()
)
GRAMS = tc.ngrams("qwen4_exp", vocab_size=VOCAB, rows_per_head=400, border=0, heads=2)
OPTIONS: dict[str, Any] = {"tables": TABLE, "device_budget": BUDGET, "progress": False}


def tokens_of(count: int = 20_000) -> Any:
    """Return tokens, a few of them frequent."""
    rng = np.random.default_rng(0)
    return np.minimum(rng.zipf(1.3, count), VOCAB - 1).astype(np.uint16)


@pytest.mark.parametrize("min_count", [1, 3])
def test_a_sub_dataset_has_the_keys_of_its_sequences_and_their_counts(tmp_path: Path, min_count: int) -> None:
    """Equal to counting each n-gram of each sequence; keys that are too rare share a row."""
    tokens = tc.TokenFiles(tokens_of(), LENGTH)
    data = tc.record_ngrams(tokens, GRAMS, tmp_path / "keys", min_count=min_count, **OPTIONS)
    assert len(data) > 1
    everything, counts = np.unique(GRAMS(tokens.read(0, len(tokens))), return_counts=True)
    rare = everything[counts < min_count]
    sequences = list[int]()
    for one in data.passes:
        mine = one.recorded.indices(np.arange(one.samples))
        keys = GRAMS(tokens.read(int(mine[0]), int(mine[-1]) + 1)).reshape(-1)
        unique, times = np.unique(keys[~np.isin(keys, rare)], return_counts=True)
        order = np.argsort(one.keys("gram"))
        found, seen = one.keys("gram")[order], one.counts("gram")[order]
        own = found >= 0
        np.testing.assert_array_equal(found[own], unique)
        np.testing.assert_array_equal(seen[own], times)
        assert seen[~own].sum() == keys.size - times.sum()
        sequences += mine.tolist()
    assert sequences == list(range(len(tokens)))
    assert {one.recorded.recording.batch_size for one in data.passes} == {1}, "as a DataLoader's"
    again = tc.record_ngrams(tokens, GRAMS, tmp_path / "keys", min_count=min_count, **OPTIONS)
    assert again.digest == data.digest


def test_every_pass_but_the_last_has_a_multiple_of_sequences(tmp_path: Path) -> None:
    """So that the batches of a step are of one pass if gradients are accumulated."""
    tokens = tc.TokenFiles(tokens_of(), LENGTH)
    samples = [
        [one.samples for one in tc.record_ngrams(tokens, GRAMS, tmp_path / str(count), **OPTIONS, **options).passes]
        for count, options in enumerate(({}, {"batch_multiple": 24}))
    ]
    assert any(one % 24 for one in samples[0][:-1])
    assert not any(one % 24 for one in samples[1][:-1])
    assert samples[1][-1] % 24
    assert [*map(sum, samples)] == [len(tokens)] * 2


def test_a_stop_at_any_pass_resumes_to_the_same_files(tmp_path: Path) -> None:
    """Other tokens or n-grams are refused there."""
    tokens = tc.TokenFiles(tokens_of(), LENGTH)
    whole = tc.record_ngrams(tokens, GRAMS, tmp_path / "whole", **OPTIONS)
    assert len(whole) > 1

    class Stopping(tc.TokenFiles):
        left = 0

        def read(self, first: int, last: int) -> Any:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().read(first, last)

    stopping = Stopping(tokens_of(), LENGTH)
    for reads in (1, 12, 25):
        out, stopping.left = tmp_path / f"stopped-{reads}", reads
        with pytest.raises(KeyboardInterrupt):
            tc.record_ngrams(stopping, GRAMS, out, **OPTIONS)
        tc.record_ngrams(tokens, GRAMS, out, **OPTIONS)
        assert files_of(out) == files_of(tmp_path / "whole")
    other = tc.ngrams("qwen4_exp", vocab_size=VOCAB, rows_per_head=400, border=0, heads=2, seed=1)
    with pytest.raises(ExtractionError, match="ngrams"):
        tc.record_ngrams(tokens, other, out, **OPTIONS)
    changed = tokens_of()
    changed[0] += 1
    with pytest.raises(ExtractionError, match="checksums"):
        tc.record_ngrams(tc.TokenFiles(changed, LENGTH), GRAMS, out, **OPTIONS)


def test_tokens_are_told_apart_by_their_numbers(tmp_path: Path) -> None:
    """The same bytes read with another dtype are other tokens, and the same tokens in another dtype are the same."""
    path = tmp_path / "t.bin"
    tokens_of().astype("<u2").tofile(path)
    facts = {dtype: tc.TokenFiles(path, LENGTH, dtype=dtype).facts for dtype in ("<u2", ">u2")}
    assert facts["<u2"] == tc.TokenFiles(tokens_of().astype(np.int32), LENGTH).facts != facts[">u2"]


def test_a_model_trains_on_the_recorded_sequences_as_in_torch(tmp_path: Path) -> None:
    """Shuffled, out of core, with the losses of nn.Embedding and Adagrad on the same batches."""

    class Net(torch.nn.Module):
        def __init__(self, memory: torch.nn.Module) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.memory, self.head = memory, torch.nn.Linear(8 * GRAMS.num_heads, VOCAB)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.head(self.memory(GRAMS(x)).flatten(-2))
            return torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    tokens = tc.TokenFiles(tokens_of(8000), LENGTH)
    data = tc.record_ngrams(tokens, GRAMS, tmp_path / "keys", **OPTIONS)
    mine = Net(tc.Embedding(data.schema, "gram"))
    theirs = Net(torch.nn.Embedding(GRAMS.num_embeddings, 8, sparse=True))
    torch.nn.init.zeros_(theirs.memory.weight)
    others = [torch.optim.SGD(theirs.head.parameters(), lr=0.1),
              torch.optim.Adagrad(theirs.memory.parameters(), lr=0.1, eps=1e-10)]  # fmt: skip
    optimizer = torch.optim.SGD(mine.head.parameters(), lr=0.1)
    steps = 0
    with tc.TierCache(
        tmp_path / "store", data, model=mine, optimizer=optimizer, device_budget="1MiB", host_budget="16MiB",
        progress=False,
    ) as cache:  # fmt: skip
        for p in cache.passes(epochs=2):
            for x in p.loader(tokens, batch_size=32, shuffle=True):
                loss, other = mine(x), theirs(x)
                for one, each in ((loss, [cache.optimizer]), (other, others)):
                    one.backward()
                    for step in each:
                        step.step()
                        step.zero_grad()
                torch.testing.assert_close(loss, other, atol=1e-5, rtol=1e-5)
                steps += 1
    assert steps > 10


def test_several_tables_have_ngrams_of_their_own(tmp_path: Path) -> None:
    """Like the layers of an Engram."""
    tables = [tc.Table(name=f"layer{layer}", dim=8) for layer in (1, 4)]
    grams = {
        f"layer{layer}": tc.ngrams(
            "engram", vocab_size=VOCAB, rows_per_head=300, padding=0, layers=(1, 4), layer=layer, heads=2
        )
        for layer in (1, 4)
    }
    tokens = tc.TokenFiles(tokens_of(2000), LENGTH)
    data = tc.record_ngrams(tokens, grams, tmp_path / "keys", **OPTIONS | {"tables": tables, "device_budget": "1MiB"})
    for name, one in grams.items():
        assert set(data.passes[0].keys(name)) == set(one(tokens.read(0, len(tokens))).reshape(-1).tolist())
    with pytest.raises(ValueError, match="n-grams were given for layer1, but the tables are layer1, layer4"):
        tc.record_ngrams(tokens, {"layer1": grams["layer1"]}, tmp_path / "x", **OPTIONS | {"tables": tables})
    with pytest.raises(ValueError, match="but the tables are layer1, layer4, layer1: pass a dict with the NGrams"):
        tc.record_ngrams(tokens, grams, tmp_path / "x", **OPTIONS | {"tables": [*tables, tables[0]]})


def test_budgets_and_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """The error has the value found and a remedy."""
    tokens = tc.TokenFiles(tokens_of(2000), LENGTH)
    with pytest.raises(BudgetError, match="raise device_budget"):
        tc.record_ngrams(tokens, GRAMS, tmp_path / "a", **OPTIONS | {"device_budget": "1KiB"})
    small = tc.ngrams("exact", vocab_size=10)
    with pytest.raises(ValueError, match=r"token 49 is outside the vocabulary, \[0, 10\)"):
        tc.record_ngrams(tokens, small, tmp_path / "b", **OPTIONS)
    with pytest.raises(ValueError, match="min_count is 0"):
        tc.record_ngrams(tokens, GRAMS, tmp_path / "c", min_count=0, **OPTIONS)
    with pytest.raises(ValueError, match="batch_multiple is 0"):
        tc.record_ngrams(tokens, GRAMS, tmp_path / "d", batch_multiple=0, **OPTIONS)
    with pytest.raises(BudgetError, match="or a smaller batch_multiple"):
        tc.record_ngrams(tokens, GRAMS, tmp_path / "e", batch_multiple=1000, **OPTIONS)


def test_tokens_come_from_files_of_every_kind(tmp_path: Path) -> None:
    """Raw tokens, NumPy files, arrays and tensors; the rest at the end of a file makes no sequence."""
    rows = np.arange(50, dtype=np.int64)
    rows.astype(np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", rows[:35].astype(np.int32))
    tokens = tc.TokenFiles([tmp_path / "a.bin", tmp_path / "b.npy", rows[::-1].copy(), torch.arange(9)], 8, dtype="u2")
    assert len(tokens) == 6 + 4 + 6 + 1
    expected = [*rows[:48].reshape(-1, 8), *rows[:32].reshape(-1, 8), *rows[::-1][:48].reshape(-1, 8), rows[:8]]
    np.testing.assert_array_equal(tokens.read(0, 17), expected)
    np.testing.assert_array_equal(tokens.read(5, 11), expected[5:11])
    assert tokens[7].dtype == torch.int64
    np.testing.assert_array_equal(torch.stack([*map(tokens.__getitem__, range(17))]).numpy(), expected)
    with pytest.raises(IndexError, match="sequence 17 of 17"):
        tokens[17]


def test_integers_of_numpy_are_taken_as_those_of_python(tmp_path: Path) -> None:
    """The datasets and tables are the same. A bool is refused."""
    made = []
    for name, of_int in (("python", int), ("numpy", np.int32)):
        tokens = tc.TokenFiles(np.arange(90) % 11, of_int(8))
        grams = tc.ngrams("engram", vocab_size=of_int(11), rows_per_head=of_int(29), padding=of_int(0), heads=of_int(2))
        table = tc.Table(name="grams", dim=of_int(4), seed=of_int(3))
        data = tc.record_ngrams(
            tokens, grams, tmp_path / name, tables=table, device_budget=of_int(1 << 20), batch_multiple=of_int(2),
            min_count=of_int(1), devices=of_int(1),
        )  # fmt: skip
        made.append((data.digest, data.tables, tokens.facts, type(grams.num_embeddings), type(data.tables[0].dim)))
    assert made[0] == made[1]
    for wrong in (True, np.True_, 8.0, "8"):
        with pytest.raises(ValueError, match=f"sequence_length is {wrong!r}: expected the tokens per sequence"):
            tc.TokenFiles(np.arange(90), wrong)


def test_texts_become_one_file(tmp_path: Path) -> None:
    """From Parquet, Arrow and any iterable, with a separator after each; the file is written atomically."""
    texts = [[1, 2, 3], [], [4, 5]]
    table = pa.table({"tokens": pa.array(texts, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "t.parquet")
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    expected = [1, 2, 3, 9, 9, 4, 5, 9]
    for number, given in enumerate([iter(texts), tmp_path / "t.parquet", [tmp_path / "t.arrow"]]):
        path = tc.TokenFiles.write(tmp_path / f"{number}.bin", given, separator=9, dtype=np.uint16)
        assert np.fromfile(path, np.uint16).tolist() == expected
        assert tc.TokenFiles(path, 4, dtype=np.uint16).read(0, 2).reshape(-1).tolist() == expected
    with pytest.raises(FileExistsError):
        tc.TokenFiles.write(path, texts)
    for bad, words in (([[1, 70_000]], "do not fit uint16"), ([[1.5]], "float64"), (tmp_path / "t.parquet", "'words'")):
        column = "words" if words == "'words'" else "tokens"
        with pytest.raises(DatasetError, match=words):
            tc.TokenFiles.write(tmp_path / "bad.bin", bad, dtype=np.uint16, column=column)
        assert not (tmp_path / "bad.bin").exists()


def test_a_file_of_the_default_dtype_is_read_with_the_default_dtype(tmp_path: Path) -> None:
    """And a .npy file with its own dtype."""
    path = tc.TokenFiles.write(tmp_path / "t.bin", [[1, 2, 3, 4], torch.tensor([5, 6]), [], [70_000]])
    assert tc.TokenFiles(path, 7).read(0, 1).tolist() == [[1, 2, 3, 4, 5, 6, 70_000]]
    path = tc.TokenFiles.write(tmp_path / "t.npy", [[1, 2], (3, 4)], separator=np.int64(9), dtype=">i2")
    assert np.load(path).tolist() == [1, 2, 9, 3, 4, 9]
    assert tc.TokenFiles(path, 3).read(0, 2).tolist() == [[1, 2, 9], [3, 4, 9]]
    assert np.load(tc.TokenFiles.write(tmp_path / "none.npy", [])).shape == (0,)


def test_tokens_of_another_dtype_are_noticed(tmp_path: Path) -> None:
    """Wider ones by their zeros, narrower ones by their size; a caller who names the dtype may have large ones."""
    path = tc.TokenFiles.write(tmp_path / "wide.bin", [range(1, 200)])
    with pytest.raises(DatasetError, match=r"every other token in .* is 0 if its dtype is uint16.* such as np.uint32"):
        tc.TokenFiles(path, 4, dtype=np.uint16)
    np.arange(500, 508, dtype=np.uint16).tofile(tmp_path / "narrow.bin")
    with pytest.raises(DatasetError, match="has token 33227258 if its dtype is uint32, the default: pass the dtype"):
        tc.TokenFiles(tmp_path / "narrow.bin", 4)
    assert tc.TokenFiles(tmp_path / "narrow.bin", 4, dtype=np.uint16).read(1, 2).tolist() == [[504, 505, 506, 507]]
    path = tc.TokenFiles.write(tmp_path / "large.bin", [[1 << 31, 1]])
    assert tc.TokenFiles(path, 2, dtype=np.uint32).read(0, 1).tolist() == [[1 << 31, 1]]


def test_writers_of_one_path_do_not_mix(tmp_path: Path) -> None:
    """The first to finish keeps it, and files of the user stay."""
    path = tmp_path / "t.bin"
    (tmp_path / "t.bin.tmp").write_text("mine")

    def slow() -> Iterator[list[int]]:
        yield [1, 2]
        tc.TokenFiles.write(path, [[3, 4]])
        yield [5, 6]

    with pytest.raises(FileExistsError, match=r"t\.bin exists: delete it, or choose another path"):
        tc.TokenFiles.write(path, slow())
    assert tc.TokenFiles(path, 2).read(0, 1).tolist() == [[3, 4]]
    assert files_of(tmp_path).keys() == {"t.bin", "t.bin.tmp"}


@pytest.mark.parametrize(
    ("texts", "options", "words"),
    [
        ([["a", "b"]], {}, r"text 0 has <U1 of shape \(2,\): expected integers with one axis"),
        (["hello"], {}, "'hello' is not the path of a Parquet or Arrow file: pass the tokens of texts"),
        ([[1], [1, None]], {}, "text 1 has object"),
        ([[[1], [2, 3]]], {}, "text 0 is list .*: expected integers with one axis"),
        ([[[1, 2], [3, 4]]], {}, r"text 0 has int64 of shape \(2, 2\)"),
        ([1, 2], {}, r"text 0 has int64 of shape \(\)"),
        ([[1 << 64]], {}, "text 0 has object"),
        ([[1 << 63]], {"dtype": "u8"}, "do not fit uint64"),
        (5, {}, "texts is 5: expected an iterable of texts"),
        ([np.ma.array([1, 2, 3], mask=[0, 1, 0])], {}, "text 0 has masked values"),
        ([torch.ones(2, dtype=torch.bfloat16)], {}, "text 0 is torch.bfloat16"),
        ([torch.ones(2, requires_grad=True)], {}, "text 0 has float32"),
        ([[True]], {}, "text 0 has bool"),
        ([[1]], {"dtype": np.float32}, "dtype is float32: expected an integer dtype"),
        ([[1]], {"dtype": "words"}, "dtype is 'words': expected an integer dtype"),
        ([[1]], {"separator": "x"}, "separator is 'x': expected a token from 0 to 4294967295"),
        ([[1]], {"separator": -1}, "separator is -1: expected a token from 0"),
        (pa.table({"tokens": [[[1], [2]]]}), {}, "column 'tokens' in row 0 of .* has object"),
        (pa.table({"tokens": [[1], [2, None]]}), {}, "column 'tokens' in row 1 of .* has float64"),
        (pa.table({"tokens": [1, 2]}), {}, "column 'tokens': it holds int64, but expected lists of integers"),
    ],
)
def test_texts_that_are_not_tokens_leave_no_file(tmp_path: Path, texts: Any, options: Any, words: str) -> None:
    if isinstance(texts, pa.Table):
        pq.write_table(texts, tmp_path / "t.parquet")
        texts = tmp_path / "t.parquet"
    before = files_of(tmp_path)
    with pytest.raises((DatasetError, ValueError), match=words):
        tc.TokenFiles.write(tmp_path / "bad.bin", texts, **options)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none/t.bin", r"t.bin cannot be written \(No such file or directory\): choose a path in a folder that exists"),
        ("t.npz", "would not be a .npz file: choose .npy, or .bin for bare tokens"),
        ("t.parquet", "would not be a .parquet file"),
    ],
)
def test_a_path_that_cannot_be_a_file_of_tokens_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        tc.TokenFiles.write(tmp_path / name, [[1]])
    assert not files_of(tmp_path)


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        ([np.zeros(9)], {}, "has float64 of shape"),
        ([np.zeros((3, 3), int)], {}, r"shape \(3, 3\)"),
        ([np.zeros(3, int)], {}, "1 files with 3 tokens have no sequence of 8"),
        (["none.bin"], {}, "cannot be read as tokens of uint32"),
        (["t.parquet"], {}, "write its tokens to one file with TokenFiles.write"),
        (["t.pq"], {}, "is a table: write its tokens"),
        (["t.npz"], {}, "may have several arrays: save one with numpy.save"),
        ([np.zeros(9, int)], {"dtype": float}, "dtype is float64"),
        (5, {}, "files is 5: expected paths or arrays of tokens"),
        ([np.ma.masked_equal(np.arange(9), 3)], {}, "an array of tokens has masked values"),
        ([torch.ones(9, dtype=torch.bfloat16)], {}, "an array of tokens is torch.bfloat16"),
        ([torch.ones(9, requires_grad=True)], {}, "has float32 of shape"),
    ],
)
def test_files_without_tokens_are_refused(tmp_path: Path, files: Any, options: Any, words: str) -> None:
    given = files if files == 5 else [tmp_path / one if isinstance(one, str) else one for one in files]
    with pytest.raises((DatasetError, ValueError), match=words):
        tc.TokenFiles(given, 8, **options)


def test_tokens_that_int64_cannot_hold_are_refused_when_read() -> None:
    """The others of the array are read."""
    tokens = tc.TokenFiles(np.array([1, (1 << 63) - 1, 2, (1 << 63) + 5], np.uint64), 2)
    assert tokens.read(0, 1).tolist() == [[1, (1 << 63) - 1]]
    with pytest.raises(DatasetError, match="token 9223372036854775813 does not fit int64"):
        tokens[1]


def test_a_loader_of_tokens_has_batches_of_its_own_size(tmp_path: Path) -> None:
    """N-grams are recorded without a loader, whose size cache.loader would otherwise take."""
    tokens = tc.TokenFiles(tokens_of(3000), LENGTH)
    data = tc.record_ngrams(tokens, GRAMS, tmp_path / "keys", **OPTIONS)
    memory = tc.Embedding(data.schema, "gram")
    with tc.TierCache(
        tmp_path / "m.tc", data, model=memory, device_budget="256KiB", host_budget="16MiB", progress=False
    ) as cache:
        with pytest.raises(ValueError, match="has drop_last True, but the key sets were recorded with False"):
            cache.loader(DataLoader(tokens, 32, drop_last=True), 1)
        with pytest.raises(ValueError, match="has no batch_size: set batch_size="):
            cache.loader(DataLoader(tokens, batch_sampler=[[0], [1]]), 1)
        loader, sizes = cache.loader(DataLoader(tokens, 32, shuffle=True), 1), list[int]()
        assert len(loader) == sum(-(-one.samples // 32) for one in data.passes)
        for x in loader:
            memory(GRAMS(x)).sum().backward()
            cache.optimizer.step()
            sizes.append(len(x))
    assert sum(sizes) == len(tokens)
    assert (len(sizes), max(sizes)) == (len(loader), 32)
