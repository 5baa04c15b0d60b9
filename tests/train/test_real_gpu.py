"""Only a real GPU can show that no step waits for it, and that NCCL moves every dtype."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.train.cases import SPECS, Case, Net, open_store, table, tiered
from tests.train.devices import DEVICE
from tiercache.dist.communicator import Communicator

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU: make test-gpu on a machine that has one")
CASE = Case(tables=(table("a", 16), table("b", 8)), specs=SPECS, num_samples=600, pass_rows=120)
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.uint16, torch.int32, torch.int64, torch.uint64,
)  # fmt: skip


def test_no_step_waits_for_the_gpu(tmp_path: Path) -> None:
    """Torch raises at each of its calls that synchronizes, including copies of launch tables."""
    steps = 0
    with open_store(tmp_path / "x", CASE, "memory") as store, tiered(store, CASE.cut(tmp_path / "passes")) as cache:
        model = Net(cache, CASE).to(cache.device)
        optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=0.01), torch.nn.BCEWithLogitsLoss()
        cache.register(model=model, optimizer=optimizer)
        optimizer = cache.optimizer
        for p in cache.passes(epochs=2):
            for batch in p.batches(CASE.batch, shuffle=True):
                torch.cuda.set_sync_debug_mode("error")
                try:
                    loss_of(model(batch), batch.label).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    cache.optimizer.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                steps += 1
    assert steps > CASE.num_samples // CASE.batch


def test_nccl_moves_every_dtype(tmp_path: Path) -> None:
    """With one rank, on a separate stream: a communicator, its clone, and one for the host."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    mine = Communicator(None, torch.device("cuda", 0))
    second, asking = mine.clone(), mine.clone(device="cpu")
    try:
        for ranks in (mine, second):
            for dtype in DTYPES:
                sent = torch.arange(1000, device="cuda").to(dtype)
                torch.cuda.synchronize()
                with torch.cuda.stream(torch.cuda.Stream()):
                    found = ranks.all_to_all(sent, [1000], [1000]), ranks.all_gather(sent, [1000])
                torch.cuda.synchronize()
                assert all(torch.equal(one.view(torch.uint8), sent.view(torch.uint8)) for one in found)
                assert ranks.all_to_all(sent[:0], [0], [0]).numel() == 0
        for ranks in (mine, second, asking):
            assert (ranks.exchange_splits(np.array([[3, 4]])) == [[3, 4]]).all()
            assert ranks.all_gather_object({"a": 1}) == [{"a": 1}]
            assert ranks.all_reduce_min([5, 6]) == [5, 6]
            ranks.barrier()
        assert torch.equal(asking.all_gather(torch.arange(5), [5]), torch.arange(5))
    finally:
        for ranks in (asking, second, mine):
            ranks.close()
        dist.destroy_process_group()
