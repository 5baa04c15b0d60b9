"""FSDP2: a model whose dense part is sharded trains as it is, to the bits of a plain loop."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.stacks.training import (
    CASE,
    MAX_NORM,
    assert_same,
    batches_of,
    ended,
    loss_of,
    model_of,
    opened,
    optimizer_of,
    plain,
    scheduler_of,
)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(
    folder: Path, name: str, *, whole: bool, stop: int | None = None, clips: bool = False
) -> dict[str, torch.Tensor]:
    """Train to the end, or to a commit before batch ``stop``. whole: the model is sharded, not its layer alone."""
    with opened(folder, name) as cache:
        model = model_of(cache)
        fully_shard(model if whole else model.top, mesh=init_device_mesh("cpu", (1,)))
        optimizer, scheduler = optimizer_of(cache, model), scheduler_of(cache)
        for count, batch in enumerate(batches_of(cache)):
            if count == stop:
                cache.commit()
                return {}
            loss_of(model, batch).backward()
            if clips:
                cache.clip_grad_norm_(MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return ended(folder / name, model, cache)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("whole", [False, True])
def test_a_sharded_model_ends_with_the_bits_of_a_plain_loop(tmp_path: Path, whole: bool) -> None:
    CASE.cut(tmp_path / "passes")
    trained(tmp_path, "sharded.tc", whole=whole, stop=10)
    assert_same(trained(tmp_path, "sharded.tc", whole=whole), plain(tmp_path))


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_a_sharded_model_are_clipped_with_those_of_rows(tmp_path: Path) -> None:
    CASE.cut(tmp_path / "passes")
    assert_same(trained(tmp_path, "clipped.tc", whole=True, clips=True), plain(tmp_path, clips=True))
