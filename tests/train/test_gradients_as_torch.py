"""Gradients of rows are gradients as torch has them: cases in which naive forms of placeholders break.

Each test has the number of its row in the design's list of cases.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

import tiercache as tc
from tests.train.beside_torch import CASE as LOOPS_CASE
from tests.train.beside_torch import DENSE_RATE, DIM, RATE, Ours, World
from tests.train.cases import Case
from tests.train.devices import DEVICES
from tests.train.loops import first_pass
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError

CASE = LOOPS_CASE


def lookups(model: Any, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    of_bag, of_rows = given if isinstance(given, tuple) else (given, given)
    return model.bag(of_bag), model.rows(of_rows)


def in_place(model: Any, given: Any) -> Iterator[torch.Tensor]:
    bag, rows = lookups(model, given)
    bag *= 0.5
    rows[:, 1] = 0.0
    rows.mul_(DIM**0.5)
    yield torch.cat([bag, rows], dim=1).square().sum()
    yield model.top(torch.ones(1, 2 * DIM)).sum()


def hooked(model: Any, given: Any) -> Iterator[torch.Tensor]:
    bag, rows = lookups(model, given)
    bag.register_hook(lambda gradient: gradient * 0.25)
    rows.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    yield model.top(torch.cat([bag, rows], dim=1)).square().mean()


def checkpointed(model: Any, given: Any) -> Any:
    return checkpoint(lambda: model(given), use_reentrant=False)


def penalty(model: Any, given: Any) -> Iterator[torch.Tensor]:
    out = model(given)
    (slope,) = torch.autograd.grad(out.sum(), [model.top.bias], create_graph=True)
    yield out.square().mean() + slope.square().sum()


LOSSES: dict[str, Callable[[Any, Any], Iterable[torch.Tensor]]] = {
    "one": lambda model, given: [model(given).square().mean()],
    "two, through other outputs": lambda model, given: [model(given).square().mean(), (model(given) * 0.5).sum()],
    "12: outputs are written in place": in_place,
    "hooks of outputs": hooked,
    "20: a checkpoint": lambda model, given: [checkpointed(model, given).square().mean()],
    "20: nested checkpoints": lambda model, given: [
        checkpoint(lambda: checkpointed(model, given).tanh(), use_reentrant=False).square().mean()
    ],
    "13: a penalty of the gradient by dense weights": penalty,
}


@pytest.mark.parametrize(("losses", "late"), [*((one, False) for one in LOSSES), ("one", True)])
def test_a_loop_moves_rows_as_torch_moves_weights(world: World, losses: str, late: bool) -> None:
    """1: late is after forward, as Lightning drops gradients."""
    before = world.rows("a"), world.rows("b")
    for number in range(4):
        for model, optimizer, given in world.sides(number):
            if not late:
                optimizer.zero_grad()
            for loss in LOSSES[losses](model, given):
                if late:
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()
    world.assert_same()
    assert not any(torch.equal(old, world.rows(name)) for old, name in zip(before, "ab", strict=True))


def test_a_gradient_that_comes_after_a_step_waits_for_the_next(world: World) -> None:
    """4: a retained graph may run again."""
    loss = world.model.bag(world.batches[0]).square().sum()
    loss.backward(retain_graph=True)
    world.optimizer.step()
    once = world.rows("a")
    loss.backward()
    world.optimizer.step()
    assert not torch.equal(world.rows("a"), once)


def test_a_gradient_of_weights_that_comes_after_a_step_is_refused(world: World) -> None:
    """As torch refuses it: it needs the rows that were looked up. A step of other tables does not change these."""
    weights = torch.ones(16 * 3, requires_grad=True)
    world.model.bag(world.batches[0], per_sample_weights=weights).square().sum().backward(retain_graph=True)
    once, weights.grad = weights.grad, None
    world.optimizer.zero_grad()
    loss = world.model.bag(world.batches[0], per_sample_weights=weights).square().sum()
    world.model.rows(world.batches[0]).square().sum().backward()
    world.optimizer.step()
    loss.backward(retain_graph=True)
    assert torch.equal(weights.grad, once)
    world.optimizer.step()
    with one_sentence(StateError, "weights of 'f'", "backward() before optimizer.step()"):
        loss.backward()


def test_a_gradient_that_comes_after_its_pass_is_refused(tmp_path: Any) -> None:
    """4: its rows are gone."""
    passes = Case(tables=CASE.tables, specs=CASE.specs, num_samples=64, pass_rows=32, num_keys=20).cut(tmp_path / "p")
    model = Ours()
    with tc.InMemoryCache(passes, model=model) as cache:
        loop = cache.passes(epochs=1)
        p = next(loop)
        loss = model(next(p.batches(16))).sum()
        p.skip()
        model(next(next(loop).batches(16)))
        with one_sentence(RuntimeError, "pass 0", "has ended"):
            loss.backward()
        loop.close()


def test_evaluations_with_gradients_enabled_leave_nothing(world: World) -> None:
    """11: a gradient is pending once it has arrived, not after a lookup."""
    for _ in range(20):
        world.model(world.batches[0])
    assert world.waiting == 0
    assert not world.optimizer.rows.pending


def test_a_gradient_of_dense_parameters_alone_trains_no_rows(world: World) -> None:
    """8: an error at the end of the pass."""
    before = world.rows("a")
    for batch in world.batches:
        found = torch.autograd.grad(world.model(batch).sum(), [*world.model.top.parameters()])
        for parameter, gradient in zip(world.model.top.parameters(), found, strict=True):
            parameter.grad = gradient
        world.optimizer.step()
    assert torch.equal(world.rows("a"), before)
    assert world.waiting == 0


def test_an_output_that_is_not_used_moves_no_row(passes: tc.PassDataset) -> None:
    """12: a gradient of zeros would move rows of Adam that torch does not move."""
    rows = tc.EmbeddingCollection(CASE.schema, ["f", "g", "h"])
    with tc.InMemoryCache(passes, model=rows) as cache, first_pass(cache) as p:
        batches, before = p.batches(16), cache.fields("b")[0].copy()
        for _ in range(2):
            rows(next(batches))["f"].square().sum().backward()
            cache.optimizer.step()
        assert np.array_equal(cache.fields("b")[0], before)


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_one_feature_is_dropped_alone(passes: tc.PassDataset, device: str) -> None:
    """12: as if the loss had not used it; the others were changed in place, each separately."""

    def rows_after(*used: str, dropped: bool = False) -> list[np.ndarray]:
        rows = tc.EmbeddingCollection(CASE.schema, ["f", "g", "h"])
        with tc.InMemoryCache(passes, model=rows, device=DEVICES[device]()) as cache, first_pass(cache) as p:
            out = rows(next(p.batches(16)))
            sum(out[name].mul_(number).square().sum() for number, name in enumerate(used, 2)).backward()
            if dropped:
                leaves = [leaf for group in cache.optimizer.param_groups for leaf in group["params"][1:]]
                assert len(leaves) == 3
                leaves[-1].grad = None
            cache.optimizer.step()
            return [cache.fields(name)[0].copy() for name in "ab"]

    unused, dropped = rows_after("f", "g"), rows_after("f", "g", "h", dropped=True)
    assert all(np.array_equal(one, other) for one, other in zip(unused, dropped, strict=True))
    assert not np.array_equal(rows_after("f", "g", "h")[1], unused[1])


def test_outputs_are_no_views_of_one_another(world: World) -> None:
    """12: so each may be written in place."""
    rows = tc.EmbeddingCollection(CASE.schema, ["f", "g", "h"]).requires_grad_(False)
    found = rows(world.batches[0])
    kept = found["h"].clone()
    found["g"].zero_()
    assert torch.equal(found["h"], kept)


def test_a_graph_of_gradients_is_let_go(world: World) -> None:
    """13: also before a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        out = world.model(world.batches[0])
        kept = weakref.ref(out)
        (slope,) = torch.autograd.grad(out.square().sum(), [world.model.top.bias], create_graph=True)
        slope.sum().backward()
        del out, slope
        world.optimizer.zero_grad()
        assert world.waiting == 0
    finally:
        gc.enable()
    gc.collect()
    assert kept() is None


def test_the_gradients_of_what_was_put_side_by_side_are_not_copied(world: World) -> None:
    """15: the parts of one tensor stay pending as they are."""
    seen: list[int] = []
    outs = [world.model.bag(world.batches[0]), world.model.rows(world.batches[0])]
    for out in outs:
        out.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    torch.cat(outs, dim=1).square().sum().backward()
    held = [g.data_ptr() for anchor in world.optimizer.rows.anchors for one in anchor.pending for g in one.present]
    assert sorted(held) == sorted(seen)


def test_the_gradient_that_backward_was_given_may_be_written_again(world: World) -> None:
    """15: one buffer for the gradients of all micro-batches."""
    gradient, direct = torch.empty(16), torch.empty(16, DIM)
    for number in (0, 1):
        for model, optimizer, given in world.sides(number):
            optimizer.zero_grad()
            for factor in (1.0, 2.0):
                model(given).backward(gradient.fill_(factor))
                model.bag(given if model is world.model else given[0]).backward(direct.fill_(-factor))
            optimizer.step()
    world.assert_same()


@pytest.mark.parametrize("how", ["cache", "groups", "scaler"])
def test_a_gradient_that_others_have_is_not_clipped_or_scaled_for_them(world: World, how: str) -> None:
    """10, 15: the caller's, a hook's, and a view of one; the gradient of the rows is."""
    optimizer, seen = world.optimizer, list[torch.Tensor]()
    out, before = world.model.bag(world.batches[0]), world.rows("a")
    out.register_hook(seen.append)
    given, wide = torch.ones(16, DIM), torch.ones(16, 2 * DIM)
    out.backward(given)
    torch.cat([world.model.bag(world.batches[0]), world.model.rows(world.batches[0])], dim=1).backward(wide)
    if how == "cache":
        world.cache.clip_grad_norm_(1e-3)
    elif how == "groups":
        nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], 1e-3)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=1e4)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
    for one in (given, wide, *seen):
        assert torch.equal(one, torch.ones_like(one))
    optimizer.step()
    assert 0 < (world.rows("a") - before).norm() < RATE * 0.05


def test_a_gradient_that_is_changed_before_its_step_is_refused(world: World) -> None:
    """15: torch has used it by then, and rows have not."""
    wide = torch.ones(16, 2 * DIM)
    torch.cat([world.model.bag(world.batches[0]), world.model.rows(world.batches[0])], dim=1).backward(wide)
    wide.mul_(2.0)
    with world.unmoved(), one_sentence(StateError, "changed in place", "gradient.clone()"):
        world.optimizer.step()


def test_a_gradient_of_inference_mode_moves_rows(world: World) -> None:
    """15: it has no version."""
    with torch.inference_mode():
        gradient = torch.ones(16, DIM)
    for model, optimizer, given in world.sides(0):
        optimizer.zero_grad()
        model.bag(given if model is world.model else given[0]).backward(gradient)
        optimizer.step()
    world.assert_same()


def test_what_is_loaded_into_a_dense_optimizer_counts(world: World) -> None:
    """6: it replaces the groups, and the joint optimizer keeps no copy of them."""
    state = copy.deepcopy(world.dense.state_dict())
    state["param_groups"][0]["lr"] = 0.0
    world.dense.load_state_dict(state)
    assert world.optimizer.param_groups[0] is world.dense.param_groups[0]
    before = world.model.top.weight.clone()
    world.model(world.batches[0]).sum().backward()
    world.optimizer.step()
    assert torch.equal(world.model.top.weight, before)
    world.optimizer.load_state_dict(world.optimizer.state_dict())  # as Accelerate does
    assert world.optimizer.param_groups[0]["lr"] == 0.0


SCHEDULES: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "a lambda for all": (lambda o: LambdaLR(o, lambda step: 0.5**step), [DENSE_RATE / 2, RATE / 2, 0.05]),
    "a lambda for each": (
        lambda o: LambdaLR(o, [lambda _: 1.0, *([lambda step: 0.5**step] * 2)]), [DENSE_RATE, RATE / 2, 0.05]),
    "cosine": (lambda o: CosineAnnealingLR(o, T_max=2), [DENSE_RATE / 2, RATE / 2, 0.05]),
    "one cycle with a rate for each": (
        lambda o: OneCycleLR(o, [2 * group["lr"] for group in o.param_groups], total_steps=10, pct_start=0.2,
                             cycle_momentum=False, div_factor=2.0), [2 * DENSE_RATE, 2 * RATE, 0.2]),
}  # fmt: skip


@pytest.mark.parametrize("what", SCHEDULES)
def test_a_schedule_of_the_joint_optimizer_changes_the_rates_of_rows(world: World, what: str) -> None:
    """7: in proportion, or with a value for each group."""
    make, rates = SCHEDULES[what]
    scheduler = make(world.optimizer)
    world.model(world.batches[0]).sum().backward()
    world.optimizer.step()
    scheduler.step()
    found = {group.get("table", "dense"): group["lr"] for group in world.optimizer.param_groups}
    assert [found[name] for name in ("dense", "a", "b")] == pytest.approx(rates)


def test_a_schedule_of_momentum_says_that_not_all_groups_have_one(world: World) -> None:
    """7: and leaves rates unchanged where given."""
    with pytest.raises(ValueError, match="must support momentum"):
        OneCycleLR(world.optimizer, 0.1, total_steps=10)


def test_clipping_the_parameters_of_all_groups_clips_rows(world: World) -> None:
    """10: by the norm of the gradients of outputs, as trainers do it."""
    before = world.rows("a")
    world.model(world.batches[0]).sum().backward()
    parameters = [one for group in world.optimizer.param_groups for one in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, 1e-3)
    assert norm > 1e-3
    world.optimizer.step()
    moved = (world.rows("a") - before).norm()
    assert 0 < moved < RATE * 0.05


def test_a_model_of_tables_alone_has_parameters(passes: tc.PassDataset) -> None:
    """19: of one element, which an optimizer and DistributedDataParallel accept."""
    bag = tc.EmbeddingBag(CASE.schema, "f")
    assert next(bag.parameters()).shape == (1, 1)
    optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
    with tc.InMemoryCache(passes, model=bag, optimizer=optimizer) as cache, first_pass(cache) as p:
        before = cache.fields("a")[0].copy()
        bag.to(torch.bfloat16)
        out = bag(next(p.batches(16)))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
        cache.optimizer.step()
        assert not np.array_equal(cache.fields("a")[0], before)


def test_a_reentrant_checkpoint_behind_a_lookup_trains_rows(world: World) -> None:
    """20: its gradient comes from a backward within a backward. Torch warns if no input requires a gradient."""
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        assert not checkpoint(world.model, world.batches[0], use_reentrant=True).requires_grad
    before = world.rows("a")
    bag = world.model.bag(world.batches[0])
    checkpoint(lambda x: x.tanh() + world.model.bag(world.batches[0]), bag, use_reentrant=True).sum().backward()
    assert world.waiting == 2
    world.optimizer.step()
    assert not torch.equal(world.rows("a"), before)


def test_a_function_of_dense_parameters_may_be_transformed(world: World) -> None:
    """21: over vectors that were looked up outside; inside, the error says so."""
    vectors = torch.cat([world.model.bag(world.batches[0]), world.model.rows(world.batches[0])], dim=1).detach()
    weights = dict(world.model.top.named_parameters())
    call: Any = torch.func.functional_call
    found = torch.func.grad(lambda w: call(world.model.top, w, (vectors,)).sum())(weights)
    assert found["weight"].shape == world.model.top.weight.shape
    with one_sentence(StateError, "looked up inside a transform of torch.func", "look up keys before it"):
        torch.func.grad(lambda w: call(world.model, w, (world.batches[0],)).sum())(dict(world.model.named_parameters()))


def test_stepping_an_optimizer_that_the_cache_was_not_given_is_named(world: World) -> None:
    """18: as a part."""
    with one_sentence(StateError, "the cache does not have this Adam", "optimizer=[...]"):
        world.optimizer.part(torch.optim.Adam(world.model.parameters()))
