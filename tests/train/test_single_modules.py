"""`EmbeddingBag` and `Embedding` in place of torch's, features of a batch, and usual loops with both."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiercache as tc
from tests.train.cases import Case, Spec, table
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError

CASE = Case(
    tables=(table("a", 4), table("b", 4)),
    specs=(Spec(name="f", table="a", hotness="ragged"), Spec(name="g", table="b")),
    num_samples=64,
    pass_rows=200,
    num_keys=20,
)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[tc.InMemoryCache]:
    """A cache in memory."""
    with tc.InMemoryCache(CASE.cut(tmp_path / "passes")) as made:
        yield made


@pytest.fixture
def batch(cache: tc.InMemoryCache) -> Iterator[tc.Batch]:
    """Its first batch."""
    loop = cache.passes(epochs=1)
    yield next(next(loop).batches(16))
    loop.close()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_gives_its_feature_of_the_collection(batch: tc.Batch, mode: str) -> None:
    bag, whole = tc.EmbeddingBag(CASE.schema, "f", mode=mode), tc.EmbeddingBagCollection(CASE.schema, ["f"], mode=mode)
    assert torch.equal(bag(batch.features["f"]), whole(batch))
    assert torch.equal(bag(batch), whole(batch))


def test_a_bag_takes_weights_with_a_gradient(batch: tc.Batch) -> None:
    """Like torch's ``per_sample_weights``: their gradient is the product of output gradient and row."""
    ids = batch.features["f"]
    weights = torch.full((len(ids.values),), 2.0, requires_grad=True)
    bag = tc.EmbeddingBag(CASE.schema, "f", mode="sum")
    vectors, out = tc.Embedding(CASE.schema, "f")(ids), bag(ids, per_sample_weights=weights)
    assert torch.equal(out, 2 * bag(ids))
    out.sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, vectors.sum(dim=1))


def test_an_embedding_gives_one_vector_for_each_id(batch: tc.Batch) -> None:
    for name in ("f", "g"):
        ids = batch.features[name]
        out = tc.Embedding(CASE.schema, name)(ids)
        assert out.shape == (len(ids.values), 4)
        assert torch.equal(out, tc.EmbeddingCollection(CASE.schema, [name])(batch)[name])
    assert batch.features["g"].offsets is None
    assert batch.features["g"].weights is None


def test_what_is_no_feature_of_a_batch_is_refused(batch: tc.Batch) -> None:
    bag = tc.EmbeddingBag(CASE.schema, "f")
    with one_sentence(TypeError, "looks up 'f'", "got a list", "batch.features['f']", "tensor of keys"):
        bag([1, 2, 3])  # type: ignore[arg-type]
    with one_sentence(StateError, "looks up f", "belongs to no cache"):
        bag(torch.arange(3).view(1, 3))
    with one_sentence(ValueError, "looks up 'f'", "got 'g'"):
        bag(batch.features["g"])
    with one_sentence(TypeError, "offsets were given", "pass none"):
        bag(batch.features["f"], torch.arange(16))
    with pytest.raises(KeyError, match="no feature 'typo': it has f, g"):
        batch.features["typo"]
    assert sorted(batch.features) == ["f", "g"]
    assert len(batch.features) == 2


def test_a_batch_moves_as_tensors_do(batch: tc.Batch) -> None:
    """Label and dense move; ids are always on the device of the rows."""
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert moved.label.device.type == moved.dense.device.type == "meta"
    assert moved.ids is batch.ids
    assert batch.features["f"].to("meta").batch is batch
    pinned = batch.pin_memory()
    assert pinned.label.is_pinned() == torch.cuda.is_available()
    assert torch.equal(pinned.label, batch.label)


@pytest.mark.parametrize("module", [tc.EmbeddingBag, tc.Embedding])
def test_gradients_scaled_by_frequency_are_refused_after_creation(module: type[tc.Embedding]) -> None:
    """Torch's modules can be set to it at any time; ours would go on adding gradients up."""
    made = module(CASE.schema, "f")
    made.scale_grad_by_freq = False
    with one_sentence(ValueError, "scale_grad_by_freq", "looks up 'f'", "pass weights"):
        made.scale_grad_by_freq = True
    assert made.scale_grad_by_freq is False


def test_batches_and_features_fit_a_line(batch: tc.Batch) -> None:
    assert repr(batch) == "Batch(16 samples of pass 0: f, g)"
    assert repr(batch.features["f"]) == "JaggedIds('f' of 16 samples)"


def test_a_printed_model_shows_what_its_modules_look_up() -> None:
    dim = CASE.tables[0].dim
    assert repr(tc.Embedding(CASE.schema, "f")) == f"Embedding(f({dim}))"
    assert repr(tc.EmbeddingBag(CASE.schema, "f")) == f"EmbeddingBag(f: mean({dim}))"
    assert repr(tc.EmbeddingBag(CASE.schema, "f", padding_idx=0)) == f"EmbeddingBag(f: mean({dim}))"


def test_a_module_in_training_is_copied_and_pickled(cache: tc.InMemoryCache, batch: tc.Batch) -> None:
    bag = tc.EmbeddingBag(CASE.schema, "f")
    cache.register(bag=bag)
    for other in (copy.deepcopy(bag), pickle.loads(pickle.dumps(bag))):
        assert torch.equal(other(batch), bag(batch))
