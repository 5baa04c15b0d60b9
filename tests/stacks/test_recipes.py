"""The recipes of docs/trainers.md run as they are on the page."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tiercache as tc
from tests.test_docs import README, blocks, set_up, write_clicks

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
RECIPES = dict(re.findall(r"^## (\S+)\n\n```py\n(.*?)^```$", PAGE.read_text(), re.S | re.M))
PACKAGES = {"Lightning": "lightning", "Transformers": "transformers", "Accelerate": "accelerate", "FSDP2": "torch"}


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    # Transformers takes the folder ``kernels`` of this repository for a package
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one and Path(one).resolve() != PAGE.parents[1]])
    (tmp_path / "clicks.toml").write_text(next(one.text for one in blocks(README) if one.language == "toml"))
    for seed, name in enumerate(("passes", "test")):
        write_clicks(tmp_path, f"{name}.parquet", seed, 3000)
        tc.extract(
            tmp_path / f"{name}.parquet", "clicks.toml", name, device_budget="64MiB", split_by="rows=1000",
            batch_multiple=500, progress=False,
        )  # fmt: skip
    found: dict[str, Any] = {}
    exec(set_up(), found)
    yield found | {"test": tc.PassDataset.open("test")}
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_stack_has_a_recipe() -> None:
    assert RECIPES.keys() == PACKAGES.keys()
    assert PAGE.read_text().count("```py\n") == len(RECIPES)


@pytest.mark.parametrize("stack", PACKAGES)
def test_a_recipe_trains_all_passes(names: dict[str, Any], stack: str) -> None:
    pytest.importorskip(PACKAGES[stack], reason=f"{stack} is not installed: make test-stacks")
    exec(compile(RECIPES[stack], str(PAGE), "exec"), names)
    (path,) = [one for one in Path.cwd().iterdir() if one.suffix == ".tc"]
    with tc.Store.open(path, mode="r") as store:
        assert store.commit is not None
        assert store.commit.cursor.pass_index == 2 * len(names["data"])
