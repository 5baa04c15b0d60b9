"""Trainings in which one rank goes another way than the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from tests.ranks.trainings import CASES, model_of, open_sharded

if TYPE_CHECKING:
    from tiercache.ranks.group import Ranks


def part_ways(ranks: Ranks, case: str, folder: str, *, what: str, placement: Any = "auto") -> None:
    """Train, rank 1 another way from the second batch of the first visit on."""
    one, other = CASES[case], ranks.rank == 1
    criterion = nn.BCEWithLogitsLoss()
    with open_sharded(ranks, one, folder, placement=placement) as cache:
        model, optimizer = model_of(cache, one)
        for visit in cache.passes(epochs=1):
            by_model = {"input": "model" if what == "reads by model" and other else "data"}
            parts = 3 if "micro" in what else 1
            # "simple": else rank 0 waits for rank 1 in a reduction of its dense gradients, which is torch's
            for batches in visit.steps(one.batch, micro_batches=parts, schedule="simple", **by_model):
                for number, batch in enumerate(batches):
                    (criterion(model(batch), batch.label) * batch.weight).backward()
                    if what == "steps early in micro-batches" and other and number == 0:
                        break
                if what == "discards" and other:
                    optimizer.zero_grad()
                    cache.discard()
                else:
                    optimizer.step()
                if not other:
                    continue
                if what == "ends the visit":
                    break
                if what == "commits":
                    cache.commit()
                if what == "evaluates":
                    next(iter(cache.evaluation(cache.pass_set)))
                if what == "sets the rate":
                    cache.set_learning_rate(0.5)
                if what == "fails":
                    raise ValueError("user code of rank 1")
            if what == "leaves an evaluation":
                for some in cache.evaluation(cache.pass_set):
                    for number, _ in enumerate(some.batches(one.batch)):
                        if other and number == 1:
                            break
