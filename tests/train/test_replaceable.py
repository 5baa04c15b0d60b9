"""Modules that do more than look up are not replaced by tc.convert."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tiercache as tc
from tests.train.cases import table, tiered
from tests.train.test_convert import SCHEMA, Small


class Scaled(nn.Embedding):
    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        return super().forward(keys) * 100.0


class Named(nn.Embedding):
    """Looks up as its base does."""


class Called(nn.Embedding):
    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        return super().__call__(keys) * 3.0  # type: ignore[no-any-return]


class Saved(nn.Embedding):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}half"] = self.weight.half()


class Projected(nn.Embedding):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(1))


def tied(model: Any) -> None:
    """Use a weight in a linear layer, as language models do."""
    model.out = nn.Linear(4, 20, bias=False)
    model.out.weight = model.user_emb.weight


def closed_over(model: Any) -> None:
    weight = model.user_emb.weight
    model.penalty = lambda: weight.square().sum()


def hook(*_: Any) -> None:
    """Do nothing."""


def user_of(kind: type[nn.Embedding]) -> Callable[[Any], object]:
    return lambda model: setattr(model, "user_emb", kind(20, 4))


TRAPS: dict[str, tuple[Callable[[Any], object], str]] = {
    "own forward": (user_of(Scaled), r"user_emb \(Scaled\) has its own forward"),
    "patched": (lambda m: setattr(m.user_emb, "forward", print), r"user_emb \(Embedding\) has its own forward"),
    "forward hook": (lambda m: m.user_emb.register_forward_hook(hook), "user_emb has forward hooks"),
    "pre-hook": (lambda m: m.user_emb.register_forward_pre_hook(hook), "user_emb has forward pre hooks"),
    "backward hook": (lambda m: m.user_emb.register_full_backward_hook(hook), "user_emb has backward hooks"),
    "hook on a weight": (lambda m: m.user_emb.weight.register_hook(hook), "the weight of user_emb has hooks"),
    "hook on an accumulated gradient": (
        lambda m: m.user_emb.weight.register_post_accumulate_grad_hook(hook), "the weight of user_emb has hooks",
    ),
    "state hook": (lambda m: m.user_emb.register_state_dict_post_hook(hook), "user_emb has state dict hooks"),
    "load hook": (
        lambda m: m.user_emb.register_load_state_dict_post_hook(hook), "user_emb has load state dict post hooks",
    ),
    "own call": (user_of(Called), r"user_emb \(Called\) has its own __call__, which the new module would not have"),
    "own state": (user_of(Saved), r"user_emb \(Saved\) has its own _save_to_state_dict"),
    "own parameter": (user_of(Projected), r"user_emb \(Projected\) has its own scale"),
    "own buffer": (
        lambda m: m.user_emb.register_buffer("mask", torch.ones(20)), r"user_emb \(Embedding\) has its own mask",
    ),
    "own child": (
        lambda m: m.items.add_module("norm", nn.LayerNorm(4)), r"items \(EmbeddingBag\) has its own norm",
    ),
    "own attribute": (
        lambda m: setattr(m.user_emb, "scale", 2.0),
        r"user_emb \(Embedding\) has its own scale, .*: move it to the module that calls it, delete it, or exclude",
    ),
    "weight_norm": (lambda m: nn.utils.parametrizations.weight_norm(m.user_emb), "user_emb is parametrized"),
    "tied": (tied, "the weight of user_emb is also out.weight"),
    "captured": (
        lambda m: setattr(m, "penalized", {"all": [m.user_emb.weight]}),
        r"the weight of user_emb is also penalized\['all'\]\[0\]",
    ),
    "closed over": (closed_over, "the weight of user_emb is also a variable of penalty"),
    "viewed": (
        lambda m: m.register_buffer("first", m.user_emb.weight.detach()[:3]), "the weight of user_emb is also first",
    ),
    "shared": (
        lambda m: setattr(m.items, "weight", m.user_emb.weight),
        "shares its weight with a module of table '(item|user)'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (nn.Embedding(9, 4, padding_idx=0), nn.Embedding(9, 4), "padding_idx=None and padding_idx=0"),
        (nn.Embedding(9, 4, padding_idx=0), nn.Embedding(9, 4, padding_idx=1), "padding_idx=1 and padding_idx=0"),
        (nn.EmbeddingBag(9, 4), nn.Embedding(9, 4, padding_idx=0), "padding_idx=0 and padding_idx=None"),
        (nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(9, 4), "max_norm=None and max_norm=1.0"),
        (nn.Embedding(9, 4, max_norm=1.0, norm_type=1.0), nn.Embedding(9, 4, max_norm=1.0), "norm_type=2.0 and norm_"),
        (nn.Embedding(9, 4, padding_idx=0), nn.EmbeddingBag(9, 4, padding_idx=0), None),
        (nn.Embedding(9, 4), nn.EmbeddingBag(9, 4, padding_idx=0), None),
        (nn.Embedding(9, 4, norm_type=1.0), nn.Embedding(9, 4), None),
    ],
)
def test_modules_of_one_weight_have_the_same_settings(first: nn.Module, second: nn.Module, words: str | None) -> None:
    """One would return a row that the other trains or scales, or not. A bag only skips its padding."""
    nn.init.zeros_(first.weight)  # type: ignore[arg-type]
    second.weight = first.weight  # type: ignore[assignment]
    model = nn.ModuleDict({"encoder": first, "decoder": second})
    if words is None:
        assert isinstance(tc.convert(model), nn.ModuleDict)
        return
    with pytest.raises(ValueError, match=f"decoder and encoder share a weight, but have {words}"):
        tc.convert(model)


def test_a_weight_of_two_optimizers_is_refused(tmp_path: Path) -> None:
    """Its rows would step with one of them: in tc.convert, in the cache, and if it is added later."""
    model: Any = nn.ModuleDict({"user": nn.Embedding(20, 4)})
    words = "SGD and Adagrad both have the parameter of user, but rows step with one optimizer: leave it out"
    kinds = (torch.optim.SGD, torch.optim.Adagrad)
    with pytest.raises(ValueError, match=words):
        tc.convert(model, optimizer=[kind(model.parameters(), lr=0.1) for kind in kinds])
    tc.convert(model, optimizer=tc.optim.SGD(learning_rate=0.1))
    data = tc.write_key_sets(tmp_path / "keys", model["user"].schema, [{"user": np.arange(20)}])
    both = [kind(model.parameters(), lr=0.1) for kind in kinds]
    with pytest.raises(ValueError, match=words):
        tiered(tmp_path / "m.tc", data, model=model, optimizer=both)
    first, second = both[0], torch.optim.Adagrad([nn.Parameter(torch.zeros(1))], lr=0.1)
    other = nn.ParameterList(second.param_groups[0]["params"])
    with tiered(tmp_path / "n.tc", data, model=[model, other], optimizer=[first, second]) as cache:
        for p in cache.passes(epochs=1):
            second.add_param_group({"params": [*model.parameters()]})
            model["user"](torch.arange(20)).sum().backward()
            with pytest.raises(ValueError, match=words):
                cache.optimizer.step()
            cache.optimizer.zero_grad()
            p.stop()


@pytest.mark.parametrize("what", TRAPS)
def test_a_module_that_does_more_than_look_up_is_not_replaced(what: str) -> None:
    model = Small()
    change, words = TRAPS[what]
    change(model)
    before = [type(one) for one in model.modules()]
    with pytest.raises(ValueError, match=words):
        tc.convert(model, SCHEMA, {"items": "item"})
    assert [type(one) for one in model.modules()] == before


def test_marks_of_libraries_on_a_module_are_no_attributes_of_the_model() -> None:
    """For example that of transformers for initialized modules."""
    model = nn.ModuleDict({"user": Named(20, 4)})
    model["user"]._is_hf_initialized = True  # type: ignore[assignment]
    assert isinstance(tc.convert(model)["user"], tc.Embedding)  # type: ignore[index]


def test_a_state_of_the_original_model_is_refused_wherever_a_table_was() -> None:
    class Triples(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entity = nn.Parameter(torch.zeros(20, 4))
            self.items = nn.EmbeddingBag(20, 4, mode="sum")

    state = Triples().state_dict()
    model = tc.convert(Triples(), parameters=["entity"])
    with pytest.raises(RuntimeError, match=r"entity is a whole table(.|\n)*items.weight is a whole table"):
        model.load_state_dict(state, strict=False)
    small = tc.convert(Small(), SCHEMA, {"items": ["item", "seen"]})
    with pytest.raises(RuntimeError, match=r"items.weight is a whole table, whose rows are in the store now: load it"):
        small.load_state_dict(Small().state_dict(), strict=False)
    small.load_state_dict(small.state_dict())


def test_an_optimizer_that_was_made_before_is_named(tmp_path: Path) -> None:
    """It holds weights that were replaced, and would step them for nothing."""
    model: Any = nn.ModuleDict({"user": nn.Embedding(20, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = [table("user", 4, tc.optim.SGD(learning_rate=0.1), tc.init.Zeros())]
    data = tc.write_key_sets(tmp_path / "keys", tables, [{"user": np.arange(20)}])
    with pytest.warns(UserWarning, match=r"user is also in a list of 1 .* pass that as tc.convert\(optimizer"):
        tc.convert(model, data)
    with tiered(tmp_path / "m.tc", data, model=model, optimizer=optimizer) as cache:
        loop = cache.passes(epochs=1)
        words = r"first has shape \(20, 4\).*create optimizers after tc.convert"
        with pytest.raises(tc.errors.StateError, match=words):
            next(loop)


def test_a_padding_row_that_is_not_zeros_is_not_replaced() -> None:
    model = nn.ModuleDict({"user": nn.Embedding(20, 4, padding_idx=2), "item": nn.EmbeddingBag(20, 4, padding_idx=2)})
    for one in model.values():
        nn.init.constant_(one.weight, 7.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"row 2 of user is padding and is not zero.*user.weight\[2\] = 0"):
        tc.convert(model, SCHEMA)
    with torch.no_grad():
        model["user"].weight[2] = 0  # type: ignore[index,operator]
    tc.convert(model, SCHEMA)


@pytest.mark.parametrize(("first", "fits"), [(80, True), (60, False)])
def test_weights_that_share_a_storage_and_no_memory_are_replaced(first: int, fits: bool) -> None:
    """For example cut from one buffer; an overlap is refused."""
    flat = torch.zeros(100)
    model = nn.ModuleDict({"user": nn.Embedding(20, 4), "top": nn.Linear(4, 2, bias=False)})
    views = {"user.weight": flat[:80].view(20, 4), "top.weight": flat[first : first + 8].view(2, 4)}
    model.load_state_dict(views, assign=True)
    if fits:
        assert isinstance(tc.convert(model, SCHEMA)["user"], tc.Embedding)  # type: ignore[index]
    else:
        with pytest.raises(ValueError, match=r"the weight of user is also top\.weight"):
            tc.convert(model, SCHEMA)


@pytest.mark.parametrize(("first", "fits"), [(20, True), (19, False)])
def test_slices_of_one_tensor_that_do_not_overlap_are_two_tables(first: int, fits: bool) -> None:
    """For example of one pretrained matrix; slices that overlap would diverge."""
    whole = torch.randn(40, 4)
    slices = {"user": whole[:20], "item": whole[first : first + 20]}
    model: Any = nn.ModuleDict({name: nn.Embedding.from_pretrained(one) for name, one in slices.items()})
    if fits:
        assert torch.equal(tc.convert(model)["item"].weights["item"], whole[20:])
    else:
        with pytest.raises(ValueError, match="item shares its weight with a module of table 'user'"):
            tc.convert(model)


@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(20, 4)), torch.zeros(20, 4)])
def test_a_weight_cannot_be_assigned_after_the_conversion(value: torch.Tensor) -> None:
    model: Any = tc.convert(Small(), SCHEMA, {"items": ["item", "seen"]})
    with pytest.raises(AttributeError, match="the weight of table 'user' was assigned, but its rows are in the store"):
        model.user_emb.weight = value
    if isinstance(value, nn.Parameter):
        with pytest.raises(AttributeError, match="the weight of table 'item' was assigned"):
            model.items.weight = value
    model.user_emb.scale = nn.Parameter(torch.ones(1))
    assert "user_emb.scale" in dict(model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_keys_have_the_dtype_of_the_module_or_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    """Torch requires the module's; gradients reach them."""
    plain: Any = nn.ModuleDict({"user": nn.EmbeddingBag(20, 4, mode="sum")})
    data = tc.write_key_sets(tmp_path / "keys", [tc.Table(name="user", dim=4)], [{"user": np.arange(20)}])
    model: Any = tc.convert(copy.deepcopy(plain), data)
    keys = torch.tensor([[1, 2], [3, 1]])
    with tiered(tmp_path / "m.tc", data, model=model) as cache:
        for module in (plain, model):
            module.to(dtype)
        for p in cache.passes(epochs=1):
            weights = [torch.full((2, 2), 0.5, dtype=dtype, requires_grad=True) for _ in range(2)]
            outs = [one["user"](keys, per_sample_weights=w) for one, w in zip((model, plain), weights, strict=True)]
            for out in outs:
                out.float().square().sum().backward()
            torch.testing.assert_close(outs[0], outs[1], rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=3e-2, atol=3e-2)
            cache.optimizer.zero_grad()
            assert model["user"](keys, per_sample_weights=torch.ones(2, 2)).dtype == dtype
            with pytest.raises(TypeError, match=r"per_sample_weights are a list: expected a tensor of torch\.float32"):
                model["user"](keys, per_sample_weights=[[1.0, 1.0], [1.0, 1.0]])
            p.stop()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_outputs_have_the_dtype_of_the_weight_that_was_replaced(tmp_path: Path, dtype: torch.dtype) -> None:
    """The model may have been cast before tc.convert."""
    data = tc.write_key_sets(tmp_path / "keys", [tc.Table(name="user", dim=4)], [{"user": np.arange(20)}])
    plain: Any = nn.ModuleDict({"user": nn.Embedding(20, 4, dtype=dtype)})
    keys = torch.arange(20)
    expected = plain["user"](keys).detach()
    model: Any = tc.convert(plain, data)
    with tiered(tmp_path / "m.tc", data, model=model), torch.no_grad():
        found = model["user"](keys)
    assert found.dtype == model["user"].weight.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
