"""A training on ranks that keeps states by name, and resumes from one."""

from typing import Any

from tests.dist.trainings import CASES, dense_of, model_of, open_sharded, trained
from tiercache.dist.communicator import AnyCommunicator


def train(
    ranks: AnyCommunicator, case: str, folder: str, moments: dict[str, list[int]], **options: Any
) -> dict[str, Any]:
    """Train a case to its end and keep the moment after each named batch; returns the commits and the dense part."""
    with open_sharded(CASES[case], folder, **options) as cache:
        tracked = model_of(cache, CASES[case])
        kept = {}
        for p, number in trained(cache, CASES[case], tracked):
            for name, moment in moments.items():
                if [p.index, number] == moment:
                    kept[name] = cache.keep(name)
        cache.keep("end")
        return {"kept": kept, **dense_of(tracked[0])}
