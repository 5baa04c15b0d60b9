"""Looking at what a dead process, or a loss of power, left of a store; and going on from there."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

from benchmarks.store_workload import STEPS, go_on, problems, stands
from tiercache.store import Store, StoreError, StoreMissingError
from tiercache.store.verification import Verification

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.store_child import Teller

KINDS = LOST, FAILING, SILENT = "lost", "failing", "silent"
"""A commit that was durable is gone, or one that never began is there; the store does not open, or verify, or go on;
rows have other bits and nothing says so."""


def examine(path: Path, engine: str, teller: Teller, *, begun: int, done: int) -> None:
    """Open what is there, check every row, go on to the last commit, and check again.

    Tells the commit it stood at ("stands"), and for each thing that is wrong its kind and a sentence ("wrong"). Call
    it in a child: what is wrong may kill the process.
    """
    wrong: list[tuple[str, str]] = []
    teller.say("wrong", wrong)
    found = _look(path, engine, wrong)
    teller.say("stands", found)
    if found is not None and not done <= found <= begun:
        wrong.append((LOST, f"commit {done} was done and {begun} begun, and the store stands at {found}"))
    if not wrong:
        try:
            go_on(path, engine, teller.note)
        except StoreError as error:
            wrong.append((FAILING, f"the store at commit {found} does not go on: {error}"))
        else:
            last = _look(path, engine, wrong)
            if last != len(STEPS) - 1:
                wrong.append((LOST, f"the workload went on to commit {len(STEPS) - 1} and the store stands at {last}"))
    teller.say("wrong", wrong)


def _look(path: Path, engine: str, wrong: list[tuple[str, str]]) -> int | None:
    """Open the store for reading, check all that it holds, and return the commit it stands at; None if it fails."""
    try:
        with Store.open(path, engine=engine, mode="r") as store:
            if store.commit is not None:
                wrong += [(SILENT, sentence) for sentence in problems(store)]
                with contextlib.redirect_stdout(io.StringIO()):
                    wrong += [(FAILING, sentence) for sentence in Verification(store).run()["problems"]]
            return stands(store)
    except StoreMissingError:
        return -1
    except StoreError as error:
        wrong.append((FAILING, f"the store does not open: {type(error).__name__}: {error}"))
        return None
