"""Ids of batches in the place of a tensor of keys: they are compared like that tensor, and all else is an error."""

import copy
import operator
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.dist.pool import RanksPool
from tests.train.cases import Case, Spec, resident, table, tiered
from tests.train.loops import first_pass
from tests.train.test_bad_input import one_sentence
from tiercache.dist.communicator import AnyCommunicator

CASE = Case(
    tables=(table("a", 4), table("b", 4)),
    specs=(
        Spec(name="one", table="a"), Spec(name="three", table="b", hotness="multi_hot"),
        Spec(name="some", table="b", hotness="ragged"),
    ),
    num_samples=64, pass_rows=32, num_keys=12,
)  # fmt: skip
ABSENT = 1 << 50
KEYS = {
    "one": np.array([3, -4, 0, 3]), "three": np.array([[0, 0, 1], [1, 2, 0], [5, 5, 5], [0, -4, 1]]),
    "some": (np.array([0, 7, 0, 0, -4]), np.array([0, 0, 3, 3, 5])),
}  # fmt: skip


@pytest.fixture
def batch(passes: tc.PassDataset) -> Iterator[tc.Batch]:
    with first_pass(resident(passes)) as p:
        yield next(p.batches(16))


def keys_as_tensors(source: Any, batch: tc.Batch) -> dict[str, torch.Tensor]:
    found = {}
    for spec in CASE.specs:
        keys = torch.from_numpy(source.keys(spec.table)[batch.ids[spec.name].ids].copy())
        found[spec.name] = keys.view(-1, 3) if spec.hotness == "multi_hot" else keys
    return found


@pytest.mark.parametrize("name", ["one", "three", "some"])
def test_features_are_compared_with_a_key_as_a_tensor_of_keys_is(passes: tc.PassDataset, name: str) -> None:
    seen = set()
    for p in resident(passes).passes(epochs=1):
        batches = list(p.batches(16))
        p.skip()
        for batch in batches:
            keys = keys_as_tensors(p.source.whole, batch)[name]
            for key in (0, 1, 3, -4, np.int64(2), np.int32(0), ABSENT, -(1 << 62), *np.unique(keys.numpy())[:4]):
                for compare in (operator.eq, operator.ne):
                    found = compare(batch.features[name], key)
                    assert found.dtype == torch.bool
                    assert torch.equal(found, compare(keys, int(key)))
                    seen |= {*found.flatten().tolist()}
    assert seen == {False, True}


@pytest.mark.parametrize("by", ["raw keys", "keys outside the pass", "evaluated keys", "evaluation"])
def test_features_of_every_batch_are_compared_by_keys(tmp_path: Path, passes: tc.PassDataset, by: str) -> None:
    with tiered(tmp_path / "m.tc", passes) as cache, first_pass(cache) as p:
        if by == "raw keys":
            held = [p.source.whole.keys(name)[:4] for name in ("a", "b")]
            keys = {"one": held[0], "three": np.stack([held[1]] * 3, 1), "some": (held[1], np.array([0, 0, 3, 3, 4]))}
            batch = p.batch(keys)
        elif by == "evaluation":
            slices = cache.evaluate(passes)
            part = next(slices)
            batch = next(part.batches(16))
            expected = keys_as_tensors(passes.passes[0], batch)
        else:
            keys = KEYS | {"one": np.array([3, -4, 0, ABSENT])}
            batch = p.batch(keys, missing="init") if by == "keys outside the pass" else cache.evaluate_batch(keys)
        if by != "evaluation":
            expected = {n: torch.from_numpy(v[0] if isinstance(v, tuple) else v) for n, v in keys.items()}
        for name, tensor in expected.items():
            for key in (0, -4, 5, ABSENT, int(tensor.flatten()[0])):
                assert torch.equal(batch.features[name] == key, tensor == key)
                assert torch.equal(batch.features[name] != key, tensor != key)


def masks_on_ranks(ranks: AnyCommunicator, folder: str, raw: str) -> tuple[Any, Any, bool]:
    """Return a mask of this rank's samples, the expected one, and whether other vectors are zeros."""
    passes = tc.PassDataset.open(f"{folder}/passes")
    bag = tc.EmbeddingBag(CASE.schema, "some", mode="mean", padding_idx=0)
    rows = tc.Embedding(CASE.schema, "three", padding_idx=0)
    with tiered(Path(folder) / "m.tc", passes, model=nn.ModuleList([bag, rows])) as cache, first_pass(cache) as p:
        if raw:
            keys = KEYS | {"one": np.zeros(4, np.int64)}
            batch = p.batch(keys, missing="init") if raw == "missing" else cache.evaluate_batch(keys)
            expected = torch.from_numpy(KEYS["three"])
        else:
            batch, source = next(p.batches(16)), passes.passes[p.sub_dataset]
            ids = source.read(np.arange(ranks.rank * 8, ranks.rank * 8 + 8)).ids["three"].ids
            expected = torch.from_numpy(source.keys("b")[ids].reshape(-1, 3))
        mask, zeros = batch.features["three"] == 0, (rows(batch) == 0).all(dim=2)
        bag(batch)
        return mask.tolist(), (expected == 0).tolist(), bool((zeros & ~mask).any())


@pytest.mark.parametrize("raw", ["", "missing", "evaluated"])
def test_ranks_mask_their_own_samples(ranks_pool: RanksPool, tmp_path: Path, raw: str) -> None:
    CASE.cut(tmp_path / "passes")
    for mask, expected, other_zeros in ranks_pool.run(2, f"{__name__}:masks_on_ranks", folder=str(tmp_path), raw=raw):
        assert mask == expected
        assert any(map(any, mask))
        assert not other_zeros


OTHERS = [
    operator.invert, operator.neg, operator.abs, bool, len, iter, list, int, float, np.asarray, torch.as_tensor, round,
    *(
        lambda ids, by=by, other=other: by(ids, other)
        for by in (operator.lt, operator.le, operator.gt, operator.ge, operator.add, operator.mod, operator.floordiv,
                   operator.and_, operator.getitem, operator.contains, operator.pow)
        for other in (0, torch.zeros(2))
    ),
    lambda ids: 1 + ids, lambda ids: 2 * ids, lambda ids: torch.zeros(3) * ids, lambda ids: np.int64(3) - ids,
    lambda ids: np.arange(3) - ids, lambda ids: ids[:, None], lambda ids: 5 in ids,
    lambda ids: ids == ids, lambda ids: ids == None, lambda ids: ids != "0", lambda ids: ids == 0.0,  # noqa: E711, PLR0124
    lambda ids: ids == True, lambda ids: ids == torch.tensor(0), lambda ids: ids != [0],  # noqa: E712
    lambda ids: torch.where(ids, 1, 0), lambda ids: [*ids], lambda ids: 0 if ids else 1,
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(OTHERS)))
def test_any_other_operation_of_a_tensor_raises(batch: tc.Batch, which: int) -> None:
    """Python would compare objects and treat any of them as true: a mask that masks nothing."""
    for ids in (batch.features["one"], batch.features["three"], batch.ids["some"]):
        with pytest.raises(TypeError):
            OTHERS[which](ids)


def test_features_have_the_shape_of_a_tensor_of_keys(passes: tc.PassDataset, batch: tc.Batch) -> None:
    keys = keys_as_tensors(passes.passes[0], batch)
    for name in ("one", "three"):
        feature = batch.features[name]
        assert feature.shape == feature.size() == keys[name].shape
        assert feature.size(0) == keys[name].size(0)
        assert feature.size(-1) == keys[name].size(-1)
    assert not hasattr(batch.features["some"], "shape")
    with one_sentence(AttributeError, ".shape", ".offsets"):
        batch.features["some"].size(0)


@pytest.mark.parametrize("name", ["dtype", "device", "ndim", "long", "unsqueeze", "view", "clamp", "T"])
def test_what_only_a_tensor_has_says_what_there_is(batch: tc.Batch, name: str) -> None:
    """With an AttributeError, so that hasattr() works."""
    for ids in (batch.features["three"], batch.ids["one"]):
        assert not hasattr(ids, name)
        with one_sentence(AttributeError, f".{name}", "not a tensor of keys", "==", ".offsets"):
            getattr(ids, name)


def test_ids_that_are_compared_with_nothing_say_so(batch: tc.Batch) -> None:
    for ids in (batch.ids["one"], batch.ids["some"]):
        for compare in (operator.eq, operator.ne):
            with one_sentence(TypeError, "comparison", "a FeatureIds", "batch.features[name] == 0"):
                compare(ids, 0)


def test_ids_are_copied_hashed_and_moved_as_before(batch: tc.Batch) -> None:
    ids, one = batch.ids["three"], batch.features["three"]
    for made in (copy.copy(ids), copy.deepcopy(ids), pickle.loads(pickle.dumps(ids))):
        assert np.array_equal(made.ids, ids.ids)
    assert len({ids, ids, batch.ids["one"]}) == 2
    assert one.to("cpu") is one
    assert len({one}) == 1
    assert ids in [ids]  # the same object is found before anything is compared


def test_a_mask_of_a_model_for_tensors_works_as_it_is(batch: tc.Batch) -> None:
    """For example SASRec multiplies vectors of padding by zero."""
    vectors = tc.Embedding(CASE.schema, "three")(batch.features["three"])
    seq = batch.features["three"]
    masked = vectors * (seq != 0).unsqueeze(-1)
    assert torch.equal((masked == 0).all(dim=2), seq == 0)


def test_a_call_that_torchs_modules_take_is_one_error(batch: tc.Batch) -> None:
    for kind in (tc.EmbeddingBag, tc.Embedding):
        name = kind.__name__
        words = [name, "as its schema", "num_embeddings and embedding_dim", f"tc.{name}(PassDataset"]
        for arguments in ((1000, 16), (5, 4), ("clicks.toml", "user")):
            with one_sentence(TypeError, *words):
                kind(*arguments)  # type: ignore[arg-type]
        for attribute, said in (("reset_parameters", "by the initializer of their table"),
                                ("sparse", "no gradient of a whole table")):  # fmt: skip
            with one_sentence(AttributeError, name, f"no {attribute}", said):
                getattr(kind(CASE.schema, "one"), attribute)
    features = batch.features
    given = {"Tensor": torch.arange(4), "JaggedIds": features["one"], "_Features": features, "dict": {"one": 1}}
    for collection in (tc.EmbeddingBagCollection, tc.EmbeddingCollection):
        for name, one in given.items():
            with one_sentence(TypeError, collection.__name__, "whole batches", f"got a {name}", "Pass.batch"):
                collection(CASE.schema)(one)
    with one_sentence(TypeError, "got dict as its schema"):
        tc.EmbeddingBagCollection({})  # type: ignore[arg-type]
    with one_sentence(TypeError, "got NoneType as its schema"):
        tc.EmbeddingCollection(None)  # type: ignore[arg-type]
    with one_sentence(AttributeError, "initializer of the table"):
        nn.init.normal_(tc.Embedding(CASE.schema, "one").weight)
    with one_sentence(AttributeError, "SharedLookup", "no max_norm"):
        _ = tc.convert(nn.Embedding(5, 4), CASE.schema, {"": ["three", "some"]}).max_norm


def test_other_unknown_attributes_are_nn_modules_matter() -> None:
    module = tc.Embedding(CASE.schema, "one")
    with pytest.raises(AttributeError, match="'Embedding' object has no attribute 'wieght'"):
        _ = module.wieght
    assert not hasattr(module, "sparse")
    assert hasattr(module, "anchor")
