"""Idioms of training loops: each gives torch's numbers, or an error that says what to write instead."""

import dataclasses
import gc
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tiercache as tc
from tests.train.beside_torch import CASE as LOOPS_CASE
from tests.train.beside_torch import Ours, World, plain
from tests.train.cases import tiered
from tests.train.test_bad_input import one_sentence
from tiercache.errors import StateError

CASE = LOOPS_CASE


def optimizers() -> list[str]:
    """The names of torch's optimizers that step dense gradients of any shape without a closure."""
    found = [
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]
    assert {"SGD", "Adam", "LBFGS", "SparseAdam"} <= {*found}
    return sorted({*found} - {"LBFGS", "Muon", "SparseAdam"})


@pytest.mark.parametrize("name", optimizers())
def test_rows_move_alike_beside_every_optimizer_of_torch(passes: tc.PassDataset, name: str) -> None:
    """No matter what the optimizer does to anchors, one step gives rows the bits they get with SGD."""
    found = []
    for kind in (torch.optim.SGD, getattr(torch.optim, name)):
        made = World(passes, kind)
        before = made.rows("a")
        made.model(made.batches[0]).square().mean().backward()
        made.optimizer.step()
        assert not torch.equal(made.rows("a"), before)
        found.append([made.rows("a"), made.rows("b")])
        made.close()
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_an_optimizer_that_needs_its_closure_is_refused(world: World) -> None:
    """Its line search moves parameters back and forth, which rows cannot."""
    calls = list[int]()
    world.optimizer.rows.dense[:] = [torch.optim.LBFGS(world.model.parameters())]

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = world.model(world.batches[0]).square().mean()
        loss.backward()
        return loss

    with world.unmoved(), one_sentence(StateError, "LBFGS evaluates the loss several times", "another optimizer"):
        world.optimizer.step(closure)
    assert not calls


def test_hooks_and_profilers_see_each_step_of_the_optimizer(world: World) -> None:
    """Like torch's optimizers, but a step without either is not recorded. Hooks of all optimizers run too."""
    seen, optimizer = list[str](), world.optimizer
    of_all = register_optimizer_step_pre_hook(lambda one, *_: seen.append(type(one).__name__))
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    rows = world.rows("a")
    world.model(world.batches[0]).square().mean().backward()
    optimizer.step()
    assert not torch.equal(world.rows("a"), rows)
    assert [one for one in seen if one != "SGD"] == ["JointOptimizer", "before", "after"]
    for handle in (of_all, before, after):
        handle.remove()
    optimizer.step()
    assert seen.count("after") == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        optimizer.step()
    assert "Optimizer.step#JointOptimizer.step" in {event.key for event in profiled.key_averages()}


def test_a_step_with_a_closure_moves_rows_as_torch_moves_weights(world: World) -> None:
    def closure(model: nn.Module, optimizer: Any, given: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(given).square().mean()
        loss.backward()
        return loss

    for number in range(4):
        ours, theirs = world.sides(number)
        ours[1].step(partial(closure, *ours))
        closure(*theirs)
        theirs[1].step()
    world.assert_same()


def assign(model: nn.Module, gradients: Iterable[Any]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


def by_hand(model: nn.Module, batch: tc.Batch, *, drops: bool = False) -> None:
    """Gradients from autograd.grad are assigned, and all others dropped before."""
    gradients = torch.autograd.grad(model(batch).square().mean(), [*model.parameters()])
    if drops:
        model.zero_grad()
    assign(model, gradients)


def combined(model: nn.Module, batch: tc.Batch) -> None:
    """Gradients of two losses are combined."""
    losses = model(batch).square().mean(), model(batch).mean()
    one, two = (torch.autograd.grad(loss, [*model.parameters()]) for loss in losses)
    assign(model, ((a + b) / 2 for a, b in zip(one, two, strict=True)))


def put_back(model: nn.Module, batch: tc.Batch) -> None:
    """Gradients are saved, dropped for those of another batch, and put back."""
    model(batch).square().mean().backward()
    kept = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(batch).mean().backward()
    model.zero_grad()
    assign(model, kept)


def by_hooks(model: nn.Module, batch: tc.Batch, *, hook: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Hooks on parameters change the gradients."""
    for parameter in model.parameters():
        parameter.register_hook(hook)
    (100 * model(batch)).square().mean().backward()


def noise(model: nn.Module, batch: tc.Batch) -> None:
    model(batch).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += 1e-3 * torch.randn_like(parameter.grad)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (by_hand, ("set by hand", "backward()")),
        (partial(by_hand, drops=True), ("set by hand", "backward()")),
        (combined, ("set by hand", "sum of losses")),
        (put_back, ("gradients were changed", "scale the loss")),
        (partial(by_hooks, hook=lambda gradient: gradient * 0.1), ("gradients were changed", "scale the loss")),
        # bounds leave tiny gradients as they are
        (partial(by_hooks, hook=lambda one: one.clamp(-0.01, 0.01)), ("gradients were changed", "scale the loss")),
        (noise, ("gradients were changed", "cache.clip_grad_norm_")),
    ],
)
def test_gradients_without_rows_are_refused(world: World, change: Callable[..., None], words: tuple[str, ...]) -> None:
    with world.unmoved():
        change(world.model, world.batches[0])
        for step in (world.optimizer.part(world.dense).step, world.optimizer.step):
            with one_sentence(StateError, *words):
                step()


@pytest.mark.parametrize("to_none", [True, False])
def test_hooks_that_only_look_on_change_nothing(world: World, to_none: bool) -> None:
    seen = list[float]()
    for parameter in world.model.parameters():
        parameter.register_hook(lambda gradient: seen.append(float(gradient.sum())))
    for number in range(3):
        for model, optimizer, given in world.sides(number):
            model(given).mean().backward()
            model.zero_grad(set_to_none=to_none)
            for part in (0.5, 0.25):
                (model(given) * part).square().mean().backward()
            optimizer.step()
            model.zero_grad(set_to_none=to_none)
            optimizer.zero_grad()
    assert seen
    world.assert_same()


def test_hooks_that_look_on_count_the_lookups_of_nested_backwards(world: World) -> None:
    """A reentrant checkpoint runs a backward within the backward."""
    for parameter in world.model.parameters():
        parameter.register_hook(lambda gradient: None)
    for model, optimizer, given in world.sides(0):
        parts = given if isinstance(given, tuple) else (given, given)
        vectors = torch.cat([model.bag(parts[0]), model.rows(parts[1])], dim=1)
        inner = torch.utils.checkpoint.checkpoint(
            lambda x, model=model: model.top(x).tanh(), vectors, use_reentrant=True
        )
        (inner.square().mean() + model.bag(parts[0]).sum() * 0.01).backward()
        optimizer.step()
    world.assert_same()


def test_gradients_that_are_only_asked_for_leave_nothing(world: World) -> None:
    """For example saliencies in an evaluation, a thousand times and without a step."""
    parameters = [*world.model.parameters()]
    for _ in range(5):
        torch.autograd.grad(world.model(world.batches[0]).square().mean(), parameters)
    assert sum(len(anchor.arrived) for anchor in world.optimizer.rows.anchors) == 2
    assert not world.waiting
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain(*world.sides(0)[0])


@pytest.mark.parametrize("bound", ["mul_", "clamp_", "data.clamp_"])
def test_hooks_that_run_once_gradients_are_accumulated_are_refused(world: World, bound: str) -> None:
    """They would miss rows, and one that bounds gradients leaves no trace."""

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        grad = parameter.grad.data if bound.startswith("data.") else parameter.grad
        _ = grad.mul_(0.1) if bound == "mul_" else grad.clamp_(-0.01, 0.01)

    handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in world.model.parameters()]
    with world.unmoved():
        with one_sentence(StateError, "register_post_accumulate_grad_hook", "rows", "cache.clip_grad_norm_(max_norm)"):
            world.model(world.batches[0]).square().mean().backward()
        world.optimizer.zero_grad()
        world.optimizer.step()
    for handle in handles:
        handle.remove()
    for name, parameter in world.model.named_parameters():
        if not name.endswith("anchor"):
            parameter.register_post_accumulate_grad_hook(hook)
    before = world.rows("a")
    plain(*world.sides(0)[0])
    assert not torch.equal(before, world.rows("a"))


def test_hooks_that_give_zeros_drop_the_gradients_of_rows(world: World) -> None:
    for parameter in world.model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.0)
    with world.unmoved():
        world.model(world.batches[0]).square().mean().backward()
        world.optimizer.step()


def test_a_loop_may_write_to_dense_parameters_after_its_step(world: World) -> None:
    model, optimizer, batch = world.sides(0)[0]
    plain(model, optimizer, batch)
    with torch.no_grad():
        for parameter in model.top.parameters():
            parameter.clamp_(-1, 1)
    model(batch).square().mean().backward()
    model.load_state_dict(model.state_dict())
    model(batch).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("by", ["cache.optimizer", "model"])
def test_parameters_may_be_written_after_a_batch_that_was_dropped(world: World, by: str) -> None:
    """A backup, or an average, is copied back. A warning covers the case that only the model dropped the gradients."""
    model, optimizer, batch = world.sides(0)[0]
    model(batch).square().mean().backward()
    (optimizer if by == "cache.optimizer" else model).zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.clone())
    expected = warnings.catch_warnings() if by == "cache.optimizer" else pytest.warns(UserWarning, match="sharpness")
    with expected:
        warnings.simplefilter("error" if by == "cache.optimizer" else "always")
        model(batch).square().mean().backward()
    model.to(torch.float32)
    model(batch).square().mean().backward()  # accumulated
    optimizer.step()
    assert not world.waiting


def test_a_frozen_module_and_an_average_are_in_no_part_and_raise_nothing(passes: tc.PassDataset) -> None:
    """With optimizers that have the other modules, and schedulers on a part."""
    model = Ours()
    model.rows.requires_grad_(False)
    one, two = torch.optim.SGD(model.bag.parameters(), lr=0.1), torch.optim.SGD(model.top.parameters(), lr=0.1)
    cache = tc.InMemoryCache(passes, model=model, optimizer=[one, two])
    average = torch.optim.swa_utils.AveragedModel(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.register(average=average)
        for p in cache.passes(epochs=1):
            for batch in p.batches(16):
                model(batch).square().mean().backward()
                cache.optimizer.step()
                average.update_parameters(model)
                cache.optimizer.zero_grad()
        tables = [group["table"] for group in cache.optimizer.part(one).param_groups if "table" in group]
        torch.optim.lr_scheduler.StepLR(cache.optimizer.part(two), 1)
    assert tables == ["a"]


def test_a_copy_of_a_batch_with_other_ids_leaves_the_batch_as_it_is(world: World) -> None:
    """Also in a compiled model, which finds batches by number."""
    compiled = torch.compile(world.model, backend="eager", fullgraph=True)
    first, second = world.batches[:2]
    with torch.no_grad():
        wanted = world.model(first), world.model(second)
        other = dataclasses.replace(first, ids=second.ids, collations=None)
        assert torch.equal(compiled(first), wanted[0])
        assert torch.equal(compiled(other), wanted[1])
        del other
        gc.collect()
        assert torch.equal(compiled(first), wanted[0])


def test_an_optimizer_that_climbs_is_refused(passes: tc.PassDataset) -> None:
    for climbs in ("all", "top"):
        model = Ours()
        parameters = model.parameters() if climbs == "all" else model.top.parameters()
        cache = tc.InMemoryCache(passes, model=model, optimizer=torch.optim.SGD(parameters, lr=0.1, maximize=True))
        loop = cache.passes(epochs=1)
        if climbs == "top":
            assert next(loop).num_samples
        else:
            with one_sentence(StateError, "optimizer has maximize=True", "negate the loss"):
                next(loop)


def test_parameters_that_no_optimizer_steps_are_named_once(passes: tc.PassDataset) -> None:
    model = Ours()
    cache = tc.InMemoryCache(passes, model=model)
    with pytest.warns(UserWarning, match=r"model.top.weight and 1 more parameters? .* no optimizer.*optimizer=\.\.\."):
        list(map(tc.Pass.stop, cache.passes(epochs=1)))
    model.top.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(map(tc.Pass.stop, cache.passes(epochs=1)))


def test_weights_that_climb_before_a_second_backward_take_the_gradients_of_that_one(world: World) -> None:
    """Sharpness-aware steps: the gradients of the first backward are dropped for rows."""
    for model, optimizer, given in world.sides(0):
        model(given).square().mean().backward()
        with torch.no_grad():
            model.top.weight.add_(model.top.weight.grad * 0.05)
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    world.assert_same()


def test_compiled_autograd_moves_rows_as_torch_moves_weights(world: World) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):  # type: ignore[attr-defined]
        compiled = torch.compile(world.model, backend="aot_eager")
        for number in range(2):
            ours, theirs = world.sides(number)
            for model, optimizer, given in ((compiled, *ours[1:]), theirs):
                model(given).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    world.assert_same()


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def test_nothing_of_ours_is_on_the_default_device(tmp_path: Path, passes: tc.PassDataset) -> None:
    found = []
    for name in ("cpu", "meta"):
        torch.manual_seed(0)
        model, keys = Ours(), torch.arange(20)
        with default_device(name):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with tiered(tmp_path / f"{name}.tc", passes, model=model, optimizer=optimizer) as cache:
                for p in cache.passes(epochs=1):
                    for batch in p.batches(16, shuffle=True, prefetch=1):
                        model(batch).square().mean().backward()
                        cache.clip_grad_norm_(1.0)
                        cache.optimizer.step()
                        cache.optimizer.zero_grad()
                    if not p.index:
                        cache.commit()
                with torch.no_grad():
                    found.append([model.bag(keys.view(5, 4)), model.rows(keys)])
                    found[-1] += [model(batch) for part in cache.evaluate(passes) for batch in part.batches(16)]
                found[-1] += [one.detach() for one in model.parameters()]
            with tiered(tmp_path / f"{name}.tc", passes, model=model, optimizer=optimizer) as again:
                again.restore()
    assert len(found[0]) > 6
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_raw_keys_are_not_on_the_default_device(tmp_path: Path) -> None:
    schema = tc.Schema(
        features=(tc.Feature(name="a"), tc.Feature(name="b", hotness="ragged")),
        tables=tuple(tc.Table(name=name, dim=4) for name in "ab"),
        dense=(tc.DenseFeature(column="x"), tc.DenseFeature(column="y")),
        label="z",
    )
    data = tc.write_key_sets(tmp_path / "keys", schema, [{"a": np.arange(20), "b": np.arange(20)}])
    found = []
    for name in ("cpu", "meta"):
        with default_device(name):
            cache = tc.InMemoryCache(data)
            bags = tc.EmbeddingBagCollection(cache.schema)
            for p in cache.passes(epochs=1):
                keys = {"a": np.arange(3), "b": (np.arange(5), [0, 2, 2])}
                batch = p.batch(keys, label=np.arange(3), dense=np.ones((3, 2)))
                found.append([batch.label, batch.dense, bags(batch).detach()])
                p.stop()
    assert [one.device.type for one in found[1]] == ["cpu"] * 3
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
