"""Keys that the pass lacks: an error, zeros, initial rows or current rows, and never another row."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiercache as tc
from tests.train.cases import (
    SPECS,
    Case,
    Result,
    Spec,
    assert_same_bits,
    open_store,
    resident,
    result_of,
    result_of_resident,
    table,
    tiered,
    train,
)
from tests.train.devices import DEVICE, DEVICES
from tests.train.oracle import initial_row
from tests.train.raw import LOW, PASS_KEYS, SCHEMA, TABLES, UNIVERSE, Rows, key_sets, own_keys, train_raw, write_passes
from tiercache.errors import KeyNotInPassError

KEY = st.sampled_from(UNIVERSE)
Lists = dict[str, list[list[int]]]
"""The keys of each sample, by feature."""
OTHER_MISSING = ["zero", "init", "load"]


@st.composite
def raw_batches(draw: st.DrawFn) -> tuple[dict[str, Any], Lists]:
    """Draw keys, present and missing, in some form, and the keys of each feature and sample."""
    n = draw(st.integers(0, 4))
    lists = {
        "one": [[draw(KEY)] for _ in range(n)],
        "bag": [draw(st.lists(KEY, max_size=4)) for _ in range(n)],
        "pair": [[draw(KEY), draw(KEY)] for _ in range(n)],
        "c": [draw(st.lists(KEY, max_size=3)) for _ in range(n)],
    }
    ends = {name: np.cumsum([0, *map(len, rows)]) for name, rows in lists.items()}
    flat = {name: np.array([key for row in rows for key in row], np.int64) for name, rows in lists.items()}
    keys = {
        "one": flat["one"],
        "bag": (torch.from_numpy(flat["bag"]), torch.from_numpy(ends["bag"])),
        "pair": torch.from_numpy(flat["pair"].reshape(n, 2)),
        "c": (flat["c"], ends["c"]),
    }
    return keys, lists


def seen(batches: list[dict[str, Any]], cache: Any) -> Any:
    """Train pass 0 by its own keys and return pass 1."""
    passes = cache.passes(epochs=1)
    bag = tc.EmbeddingBagCollection(cache.schema)
    cache.register(bag=bag)
    bag(next(passes).batch(batches[0])).sum().backward()
    cache.optimizer.step()
    return passes, next(passes)


def oracle(cache: Any, missing: str) -> Rows:
    """Return what each key reads in pass 1: current rows of its keys and, by ``missing``, rows of the others."""
    rows: Rows = {}
    for spec in TABLES:
        now = dict(zip(cache.keys(spec.name).tolist(), cache.fields(spec.name)[0].copy(), strict=True))
        trained = {*PASS_KEYS[0], *PASS_KEYS[1]}
        rows[spec.name] = {}
        for key in UNIVERSE:
            if key in PASS_KEYS[1] or (missing == "load" and key in trained):
                rows[spec.name][key] = now[key]
            else:
                zeros = np.zeros(spec.dim, np.float32)
                rows[spec.name][key] = zeros if missing == "zero" else initial_row(spec, key)
    return rows


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw_batches(), st.sampled_from(OTHER_MISSING), st.booleans(), st.sampled_from(["sum", "mean", "max"]))
def test_missing_keys_read_what_a_dict_says_and_train_nothing(
    drawn: tuple[dict[str, Any], Lists], missing: str, tiers: bool, mode: str
) -> None:
    keys, lists = drawn
    with tempfile.TemporaryDirectory() as folder:
        passes = write_passes(Path(folder) / "keys")
        reference = resident(passes)
        _held, p = seen([own_keys(0)], reference)
        rows = oracle(reference, missing)
        with open_store(Path(folder), replace(CASE, tables=TABLES), "memory") as store:
            if not tiers:
                check_batch(reference, p, keys, lists, rows, missing, mode)
                return
            with tiered(store, passes) as cache:
                _held, p = seen([own_keys(0)], cache)
                check_batch(cache, p, keys, lists, rows, missing, mode)


def check_batch(cache: Any, p: Any, keys: dict[str, Any], lists: Lists, rows: Rows, missing: str, mode: str) -> None:
    """Compare vectors with the dict's, and bags and a step with torch's; then look the same batch up again."""
    batch = p.batch(keys, missing=missing)
    assert batch.num_samples == len(lists["one"])
    assert_vectors(cache, batch, lists, rows)
    bag = tc.EmbeddingBagCollection(cache.schema, mode=mode)
    cache.register(pooled=bag)
    weights = {t.name: torch.tensor(np.array(list(rows[t.name].values())), requires_grad=True) for t in TABLES}
    order = {t.name: {key: i for i, key in enumerate(rows[t.name])} for t in TABLES}
    outs = []
    for feature in SCHEMA.features:
        ends = np.cumsum([0, *map(len, lists[feature.name])])
        ids = torch.tensor([order[feature.table][key] for row in lists[feature.name] for key in row], dtype=torch.int64)
        outs.append(
            torch.nn.functional.embedding_bag(
                ids, weights[feature.table], torch.from_numpy(ends), mode=mode, include_last_offset=True
            )
        )
    expected, found = torch.cat(outs, 1), bag(batch).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    coefficients = torch.arange(1.0, found.numel() + 1).reshape(found.shape)
    (found * coefficients).sum().backward()
    (expected * coefficients).sum().backward()
    cache.optimizer.step()
    stepped: Rows = {}
    for name, weight in weights.items():
        after = weight.detach() - (0 if weight.grad is None else 0.5 * weight.grad)
        stepped[name] = {key: after[i].numpy() if key in PASS_KEYS[1] else rows[name][key]
                         for key, i in order[name].items()}  # fmt: skip
    assert_vectors(cache, batch, lists, stepped, stepped=True)


def assert_vectors(cache: Any, batch: tc.Batch, lists: Lists, rows: Rows, *, stepped: bool = False) -> None:
    """Compare the vector of each key, bit for bit; those of keys of the pass within rounding once they were stepped."""
    vectors = tc.EmbeddingCollection(cache.schema).requires_grad_(False)(batch)
    for feature in SCHEMA.features:
        ids = [key for row in lists[feature.name] for key in row]
        found = vectors[feature.name].detach().cpu().numpy()
        found = found.reshape(-1, found.shape[-1])
        expected = np.array([rows[feature.table][key] for key in ids], np.float32).reshape(found.shape)
        exact = ~np.isin(ids, PASS_KEYS[1]) if stepped else slice(None)
        np.testing.assert_array_equal(found[exact], expected[exact])
        tolerance = 1e-2 if feature.table == "c" else 1e-5
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def missing_some(samples: tc.PassDataset) -> Callable[[int, dict[str, Any]], None]:
    """Return a change of keys: every third is from another pass, or from none."""
    others = {t.name: np.unique(np.concatenate([p.keys(t.name) for p in samples])) for t in samples.tables}
    tables = {f.name: f.table for f in samples.schema.features}

    def change(pass_index: int, keys: dict[str, Any]) -> None:
        rng = np.random.default_rng(pass_index)
        for name, form in keys.items():
            values, ends = form if isinstance(form, tuple) else (form, None)
            changed = torch.as_tensor(values).clone().numpy()
            pool = np.concatenate([others[tables[name]], [10**12 + pass_index]])
            mask = rng.random(changed.shape) < 0.3
            changed[mask] = rng.choice(pool, int(mask.sum()))
            keys[name] = changed if ends is None else (changed, ends)

    return change


CASE = Case(
    tables=(table("a", 8), table("b", 3, dtype="float16")), specs=SPECS, num_samples=96, pass_rows=32,
    shuffle=False, accumulate=2, batch=10,
)  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("missing", OTHER_MISSING)
def test_with_missing_keys_the_tiers_end_with_the_bits_of_memory(tmp_path: Path, missing: str, device: str) -> None:
    """A third of all keys: maxima, means and weights mix them with rows of the pass, also of 16 bits."""
    samples = CASE.cut(tmp_path / "samples")
    passes = key_sets(tmp_path / "keys", samples)
    options: dict[str, Any] = {"change": missing_some(samples), "missing": missing}

    def in_memory(device: Any) -> Result:
        cache = tc.InMemoryCache(passes, device=device)
        return result_of_resident(cache, train_raw(cache, CASE, samples, **options))

    expected = in_memory(DEVICES[device]())
    if DEVICE != "cuda":
        assert_same_bits(in_memory("cpu"), expected)
    with open_store(tmp_path / "model.tc", CASE, "lmdb") as store:
        with tiered(store, passes, device=DEVICES[device]("random"), commit_every=2) as cache:
            options["each_batch"] = lambda p, _: cache.commit() if p == 1 else None
            model = train_raw(cache, CASE, samples, **options)
        assert_same_bits(result_of(store, passes, model), expected)


@pytest.mark.parametrize(
    ("change", "table_", "key", "words"),
    [
        ({"c": (np.array([88, 99]), np.array([0, 1, 2, 2, 2]))}, "c", 88, "88 of table 'c' at entry 0 of feature 'c'"),
        ({"one": np.array([-1, 77, 78, 77]), "pair": np.array([[99, 99]] * 4)}, "a", 77, "77 of table 'a' at entry 1"),
    ],
)
def test_a_missing_key_is_an_error(tmp_path: Path, change: dict[str, Any], table_: str, key: int, words: str) -> None:
    """The first of several, in the last feature and in the first. The batch does not count, and the pass goes on."""
    passes, said = write_passes(tmp_path / "keys"), list[str]()
    for device in DEVICES.values():
        bag = tc.EmbeddingBagCollection(SCHEMA)
        with tiered(tmp_path / f"{len(said)}.tc", passes, device=device(), model=bag) as cache:
            for p in cache.passes(epochs=1):
                own = np.array(PASS_KEYS[p.sub_dataset])
                bag(p.batch(own_keys(p.sub_dataset))).sum().backward()
                cache.optimizer.step()
                before = [cache.live_rows().fields(t.name, own)[0] for t in TABLES]
                keys = own_keys(p.sub_dataset) | change
                keys["one"] = np.where(keys["one"] == -1, own[0], keys["one"])
                with pytest.raises(IndexError, match=rf"batch 1 of pass \d has the key {words}") as caught:
                    p.batch(keys)
                assert isinstance(caught.value, KeyNotInPassError)
                assert (caught.value.table, caught.value.key, caught.value.batch) == (table_, key, 1)
                said.append(str(caught.value))
                assert (p.batches_done, p.samples_done) == (1, 4)
                assert not cache.optimizer.rows.pending
                for mine, t in zip(before, TABLES, strict=True):
                    np.testing.assert_array_equal(mine, cache.live_rows().fields(t.name, own)[0])
                p.batch(own_keys(p.sub_dataset))
                assert (p.batches_done, p.samples_done) == (2, 8)
                p.skip()
    assert said[:3] == said[3:]


def keys_with(**changed: Any) -> dict[str, Any]:
    """Return a batch of sub-dataset 0, with other keys of some features; None leaves one out."""
    return {name: value for name, value in (own_keys(0) | changed).items() if value is not None}


@pytest.mark.parametrize(
    ("keys", "others", "message"),
    [
        (keys_with(one=[1, LOW, 3, 3]), {}, "key -9223372036854775808 at entry 1 .*INT64_MIN"),
        (keys_with(bag=([LOW + 1], [0, 0, 0, 1, 1])), {"missing": "zero"}, "-9223372036854775807 at entry 0"),
        (keys_with(one=[1, 3]), {}, r"different numbers of samples \(one: 2, bag: 4"),
        ({}, {}, "'one' was given no keys"),
        (keys_with(two=[1]), {}, "were given for 'two'"),
        (keys_with(one=np.ones(4)), {}, "keys of feature 'one' are float64"),
        (keys_with(one=np.ones((4, 1), int)), {}, r"shape \(4, 1\): it has one key per sample"),
        (keys_with(one=([1, 3], [0, 2, 2, 2, 2])), {}, "values and offsets: it has one key per sample"),
        (keys_with(pair=np.ones((4, 3), int)), {}, r"pass \(N, 2\)"),
        (keys_with(bag=np.ones((4, 1, 1), int)), {}, r"shape \(4, 1, 1\): expected \(N,\), \(N, L\) or a pair"),
        (keys_with(bag=([1, 3], [0, 1, 1, 1, 1])), {}, "keys of different numbers of samples"),
        (keys_with(bag=([1, 3], [0, 3, 2, 2, 2])), {}, "never decrease"),
        (keys_with(bag=([1, 3], [])), {}, "offsets of feature 'bag'"),
        (keys_with(bag=([1, 3], [1, 1, 2, 2, 2])), {}, "the offsets of feature 'bag' are .* begin with 0"),
        (keys_with(bag=torch.ones(4)), {}, "the keys of feature 'bag' are float32: keys are int64"),
        (keys_with(bag=torch.zeros(4, 1, 1).to_sparse()), {}, "a sparse tensor of shape"),
        (keys_with(), {"missing": "zeros"}, "invalid missing 'zeros': expected one of 'error', 'zero', 'init', 'load'"),
        (keys_with(), {"weights": {"one": [1.0]}}, r"weights of feature 'one' are float64 of shape \(1,\)"),
        (keys_with(), {"weights": {"one": torch.ones(4, requires_grad=True)}}, "require a gradient"),
        (keys_with(), {"weights": {"x": [1.0]}}, "weights were given for 'x'"),
        (keys_with(), {"label": [1.0]}, r"label has shape \(1,\): expected \(N,\) for the batch's 4 samples"),
        (keys_with(), {"dense": [1.0] * 4}, r"dense has shape \(4,\)"),
        (keys_with(), {"label": [0.0, 1.0, float("nan"), 1.0]}, "label of sample 2 is not finite"),
        (keys_with(), {"dense": [[0.0], [float("inf")], [0.0], [0.0]]}, "dense of sample 1 is not finite"),
        (keys_with(), {"label": ["a"] * 4}, "label is not an array of numbers"),
        (keys_with(), {"label": torch.empty(4, device="meta")}, "label is a sparse tensor, or one without values"),
    ],
)
def test_misfits_are_refused(tmp_path: Path, keys: dict[str, Any], others: dict[str, Any], message: str) -> None:
    passes = resident(write_passes(tmp_path / "keys")).passes(epochs=1)
    p = next(passes)
    with pytest.raises(ValueError, match=message):
        p.batch(keys, **others)
    assert (p.batches_done, p.samples_done) == (0, 0)


def test_of_a_table_in_memory_missing_keys_read_their_own_rows_and_no_more(tmp_path: Path) -> None:
    """Only vectors of trained keys; keys are sorted once, and later training counts."""
    cache = resident(write_passes(tmp_path / "keys"))
    backend, read, counts = cache._backend, cache._backend.read, list[Any]()

    def counting(field: Any, slots: Any) -> Any:
        counts.append(slots.size)
        return read(field, slots)

    backend.read = counting
    passes, p = seen([own_keys(0)], cache)
    own, found = own_keys(1), []
    trained = np.array([1, -2, 77, 5])  # sub-dataset 0 has two of them, sub-dataset 2 the last
    keys = own | {"one": trained, "pair": np.stack([trained, trained], 1)}
    for expected in ([2, 2], [2, 2]):
        found.append(tc.EmbeddingCollection(cache.schema)(p.batch(keys, missing="load"))["one"].detach().cpu().numpy())
        assert counts == expected, "two tables of one field each have missing keys that were trained"
        counts.clear()
    assert np.array_equal(*found)
    assert not np.array_equal(found[0][0], initial_row(TABLES[0], 1))
    assert np.array_equal(found[0][3], initial_row(TABLES[0], 5))
    early = cache.live_rows()
    p.skip()
    p = next(passes)
    bag = tc.EmbeddingBagCollection(cache.schema)
    bag(p.batch(own_keys(2))).sum().backward()
    cache.optimizer.step()
    counts.clear()
    for rows, few in ((cache.live_rows(), 3), (early, 2)):
        rows.fill("a", trained, (np.empty((4, 5), np.float32),))
        assert counts.pop() == few


def test_a_table_trained_with_an_out_of_vocabulary_row_reads_it_for_keys_never_trained(tmp_path: Path) -> None:
    """missing="load" reads the same as an evaluation, on the tiers and in memory."""
    case = Case(tables=(table("a", 8),), specs=(Spec(name="f", table="a"),), num_keys=120)
    passes = case.extract(tmp_path / "train", min_count=3)
    found = []
    with tc.Store.open(tmp_path / "model.tc", tables=case.tables) as store, tiered(store, passes) as cache:
        for kind in (cache, resident(passes)):
            train(kind, replace(case, epochs=1))
            loop = kind.passes(epochs=2)
            p = next(loop)
            batch = p.batch({"f": [10**9, 10**9 + 1]}, missing="load")
            vectors = tc.EmbeddingCollection(kind.schema).requires_grad_(False)(batch)["f"]
            found.append(vectors.detach().cpu().numpy())
        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[0][0], found[0][1])
        assert not np.array_equal(found[0][0], initial_row(case.tables[0], 10**9))


def test_dropped_gradients_of_missing_keys_end_the_last_pass(tmp_path: Path) -> None:
    """A batch without a row to train waits for no backward, so the loop commits the last pass."""
    tables = [tc.Table(name="a", dim=4, optimizer=tc.optim.SGD(learning_rate=0.1))]
    keys = tc.write_key_sets(tmp_path / "keys", tables, [{"a": np.arange(6)}])
    bag = tc.EmbeddingBagCollection(keys.schema)
    budgets = {"device_budget": "4MiB", "host_budget": "32MiB"}
    with tc.TierCache(tmp_path / "model.tc", keys, model=bag, **budgets) as cache:  # type: ignore[arg-type]
        for p in cache.passes(epochs=1):
            bag(p.batch({"a": np.arange(6)[:, None]})).sum().backward()
            cache.optimizer.step()
            bag(p.batch({"a": np.arange(10, 12)[:, None]}, missing="load")).sum().backward()
            cache.optimizer.zero_grad()
        assert cache.store.commit is not None
        assert [*cache.store.commit.cursor] == [1, 0]
