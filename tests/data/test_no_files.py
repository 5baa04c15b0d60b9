"""FIFOs, folders and the like in place of a small file of a dataset: an error, and at once."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import tiercache as tc
from tests.datasets import write_dataset
from tests.no_files import NO_FILES, at_once
from tests.train.cases import Case, Spec, table, tiered
from tiercache.data.array_rows import read_split_spec
from tiercache.data.inputs import find_inputs
from tiercache.errors import DatasetError, ExtractionError, SourceError, TierCacheError
from tiercache.planning.plan_file import TrainingPlan
from tiercache.reporting.figures import read_reports
from tiercache.rows import transfer_rates
from tiercache.store import StoreError
from tiercache.store.tensor_file import find_tensors

CASE = Case(
    tables=(table("a", 4),), specs=(Spec(name="f", table="a"),), num_samples=60, pass_rows=30, num_keys=20, epochs=1
)


@pytest.mark.parametrize("name", ["dataset.json", "pass-00000.safetensors"])
@pytest.mark.parametrize("what", [*NO_FILES])
def test_a_dataset_says_what_is_there(tmp_path: Path, name: str, what: str) -> None:
    """Opened, extracted into again and cut into smaller passes."""
    passes = CASE.extract(tmp_path)
    (passes.path / name).unlink()
    NO_FILES[what](passes.path / name)
    with at_once():
        with pytest.raises(DatasetError, match=": "):
            tc.PassDataset.open(passes.path)
        if what != "a link to itself":  # which does not exist, according to stat
            with pytest.raises(TierCacheError, match=": "):
                CASE.extract(tmp_path)


@pytest.mark.parametrize("name", ["lock", "state.json"])
@pytest.mark.parametrize("what", [*NO_FILES])
def test_an_extraction_says_what_is_there(tmp_path: Path, name: str, what: str) -> None:
    """In the folder that it works in."""
    folder = tmp_path / "passes-rows=30" / "unfinished"
    folder.mkdir(parents=True)
    NO_FILES[what](folder / name)
    with at_once(), suppress(ExtractionError):
        CASE.extract(tmp_path)


@pytest.mark.parametrize("what", [*NO_FILES])
def test_rates_that_are_no_file_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """They are measured again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "tiercache").mkdir()
    NO_FILES[what](transfer_rates.cache_file())
    with at_once():
        assert transfer_rates._read(transfer_rates.cache_file()) == {}


@pytest.mark.parametrize("what", [*NO_FILES])
@pytest.mark.parametrize("place", ["the file", "its draft", "the folder"])
def test_a_schedule_says_what_is_there(tmp_path: Path, what: str, place: str) -> None:
    """Or overwrites it: a training continues, or ends with an error."""
    passes = write_dataset(tmp_path / "passes", CASE.schema, [CASE.samples()])
    path = tmp_path / "model.tc"
    tiered(path, passes).close()
    (file,) = (path / "schedule").iterdir()
    file.unlink()
    match place:
        case "the file":
            NO_FILES[what](file)
        case "its draft":
            NO_FILES[what](file.with_suffix(".part"))
        case "the folder":
            (path / "schedule").rmdir()
            NO_FILES[what](path / "schedule")
    with at_once(), suppress(TierCacheError):
        tiered(path, passes).close()


@pytest.mark.parametrize("what", [*NO_FILES])
@pytest.mark.parametrize("suffix", [".bin", ".npy", ".parquet", ".arrow"])
def test_tokens_say_what_is_there(tmp_path: Path, what: str, suffix: str) -> None:
    """Read, and as a table of texts."""
    path = tmp_path / f"tokens{suffix}"
    NO_FILES[what](path)
    is_table = suffix in {".parquet", ".arrow"}
    read = partial(tc.TokenFiles.write, tmp_path / "out.bin") if is_table else partial(tc.TokenFiles, sequence_length=2)
    with at_once(), pytest.raises(DatasetError, match="tokens"):
        read(path)


READERS: dict[str, Callable[[Path], object]] = {
    "schema.toml": tc.Schema.load,
    "report.jsonl": read_reports,
    "plan.toml": lambda path: TrainingPlan.read(path, None),  # type: ignore[arg-type]
    "model.safetensors.index.json": lambda path: find_tensors(str(path.parent), "rows"),
    "column.npy": lambda path: find_inputs(path.parent),
    "feature_spec.yaml": lambda path: read_split_spec(path, "train"),
}


@pytest.mark.parametrize("what", [*NO_FILES])
@pytest.mark.parametrize("name", [*READERS])
def test_small_files_of_the_user_are_no_pipes(tmp_path: Path, name: str, what: str) -> None:
    """The error names the file, or its folder."""
    NO_FILES[what](tmp_path / name)
    with at_once(), pytest.raises((TierCacheError, StoreError, ValueError), match=tmp_path.name):
        READERS[name](tmp_path / name)


def test_a_spec_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "feature_spec.yaml").write_text("[" * 3000)
    with pytest.raises(SourceError, match=r"feature_spec.yaml is nested too deeply: it must be the feature_spec.yaml"):
        find_inputs(tmp_path)
