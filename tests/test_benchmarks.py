"""The benchmarks run, write all promised figures, and their deterministic figures are right."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import results_page, store_flips
from benchmarks.disk_case import QUICK
from benchmarks.drawn_passes import permuted_power_law
from benchmarks.kernel_cases import OPTIMIZERS
from benchmarks.machine import Goal
from benchmarks.out_of_core import fewest_rows_read, means
from benchmarks.synthetic_case import MODELS, TINY, Data

pytestmark = pytest.mark.disk

ROOT = Path(__file__).parents[1]
SAID = "command date cpu cores memory_bytes kernel python benchmark_seconds"


def figures(module: str, folder: Path, *options: str, has: str = "version_torch", true: str = "") -> dict[str, Any]:
    """Run a benchmark in its smallest form and return its figures: those that it ``has``, and facts that are true."""
    path = folder / "figures.json"
    command = [sys.executable, "-W", "ignore", "-m", module, "--tiny", "--json", str(path), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "what was promised" in done.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    assert not [key for key, value in found.items() if isinstance(value, dict | list)]
    assert found["command"].split()[:4] == ["python", "-m", module, "--tiny"]
    assert str(folder) not in found["command"]
    assert not [key for key in f"{SAID} {has}".split() if key not in found]
    assert [found[key] for key in true.split()] == [True] * len(true.split())
    return found


@pytest.mark.long
def test_out_of_core_keeps_its_plan_reads_hardly_a_row_too_many_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    found = figures(
        "benchmarks.out_of_core", tmp_path, "--folder", str(tmp_path / "data"),
        has="version_torch throughput_ratio bound_ratio wait_fraction demand raw_bytes_per_second store_bytes"
        " bytes_read_per_useful_byte in_memory_seconds tiered_seconds",
        true="planned_equals_measured bits_equal",
    )  # fmt: skip
    memory, tiered = ([float(s) for s in found[f"{name}_turns"].split()] for name in ("in_memory", "tiered"))
    assert len(memory) == len(tiered) == found["turns"]
    assert found["throughput_ratio"] == pytest.approx(sum(memory) / sum(tiered), rel=0.01)
    assert found["check_fraction"] > 0
    assert 0 < found["rows_read_optimal"] <= found["rows_read"] <= 1.01 * found["rows_read_optimal"]
    assert found["rows_needed"] == found["rows_kept"] + found["rows_from_host"] + found["rows_read"]
    assert found["table_bytes"] >= 10 * found["device_budget_bytes"]
    assert found["table_bytes"] >= 3 * found["host_budget_bytes"]
    assert found["device_bytes"] <= found["device_budget_bytes"]
    assert found["host_bytes_peak"] <= found["host_budget_bytes"]
    assert found["store_bytes_read"] == found["rows_read"] * found["row_bytes"]


@pytest.mark.long
def test_a_store_under_a_limit_of_memory_is_killed_resumed_and_has_the_same_bits(tmp_path: Path) -> None:
    found = figures(
        "benchmarks.scale", tmp_path, "--folder", str(tmp_path / "data"),
        has="version_torch throughput_ratio predicted_seconds measured_seconds beyond_bytes",
        true="planned_equals_measured bits_equal",
    )  # fmt: skip
    assert found["epochs"] * found["passes"] > found["killed_in_pass"] > found["passes"] >= 3
    assert found["data_bytes"] <= found["limit_bytes"]
    assert found["peak_bytes"] <= found["limit_bytes"]
    assert found["device_bytes"] <= found["device_budget_bytes"]
    assert found["host_bytes_peak"] <= found["host_budget_bytes"]
    assert found["rows_different"] == 0
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.long
def test_a_converted_model_is_measured_against_the_one_that_it_was(tmp_path: Path) -> None:
    keys = "version_torch speedup converted_vs_native speedup_of_epochs"
    found = figures("benchmarks.adoption", tmp_path, has=keys, true="losses_close")
    parts = found["extract_seconds"] + found["open_seconds"] + found["epochs_seconds"]
    assert found["converted_seconds"] == pytest.approx(parts)
    assert found["speedup"] == pytest.approx(found["torch_seconds"] / parts)
    assert found["loss_last"] == pytest.approx(found["converted_loss_last"], abs=1e-4)


@pytest.mark.long
def test_a_flipped_bit_of_a_store_is_without_effect_or_refused(tmp_path: Path) -> None:
    keys = "version_torch lmdb_head_flips lmdb_free_list_flips zarr_heads_flips zarr_chunks_flips"
    found = figures("benchmarks.store_flips", tmp_path, has=keys)
    assert found["flips"] == found["right"] + found["refused"] >= 30
    assert min(found["right"], found["refused"]) > 0
    assert found["silent"] == found["tracebacks"] == found["crashes"] == 0


def test_flips_that_show_another_row_or_end_the_process_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row that the store should have in another version, an unread tail of a file, something that is not a file."""
    store_flips.make(tmp_path / "lmdb", "lmdb")
    flip = ("head", "HEAD", 4000, 1)
    assert store_flips.outcome(tmp_path / "lmdb", tmp_path / "copy", flip) == "right"
    (tmp_path / "lmdb.json").write_text(json.dumps([flip, ("head", "no file", 0, 0), flip]))
    found = [said.partition(":")[0] for said in store_flips.outcomes(tmp_path, "lmdb", 3, 1, 0)]
    assert found == ["right", "crashes", "right"]
    (name, (versions, uses)), *_ = store_flips.steps._RESULT.items()
    changed = versions.copy()
    key = np.flatnonzero(versions[store_flips.TRAINED - 1] >= 0)[5]
    changed[store_flips.TRAINED - 1, key] ^= 1  # of the newest commit
    monkeypatch.setitem(store_flips.steps._RESULT, name, (changed, uses))
    assert store_flips.outcome(tmp_path / "lmdb", tmp_path / "copy", flip) == "silent: other rows were read"


def test_extraction_finds_the_keys_that_its_peers_find(tmp_path: Path) -> None:
    keys = "version_torch keyset_speed_vs_fastest dataset_speed_vs_fastest string_speed_vs_fastest"
    found = figures("benchmarks.extract", tmp_path, has=keys)
    assert found["small_passes_ratio"] == found["passes_165_seconds"] / found["passes_21_seconds"]


def test_a_repeat_of_out_of_core_is_some_turns_and_no_turn_is_left_over() -> None:
    assert means([1, 3, 5, 8], 2) == [2, 6.5]
    with pytest.raises(ValueError, match="not whole repeats, 3 "):
        replace(QUICK, repeats=3)
    with pytest.raises(ValueError, match="whole epochs of 16"):
        replace(QUICK, turns=15)


@pytest.mark.long
def test_the_exchange_benchmark_moves_hardly_a_byte_too_many(tmp_path: Path) -> None:
    keys = "version_torch time_ratio cpu_ratio time_ratio_of_calls time_saved_by_unique_ids"
    found = figures("benchmarks.exchange", tmp_path, has=keys)
    assert 1 < found["wire_ratio"] <= 1.05
    assert found["wire_ratio_verdict"] == "goal"
    assert found["bytes_saved_by_unique_ids"] > 1
    assert found["ms_bare_4xtiny"] > 0


@pytest.mark.long
def test_the_store_benchmark_measures_every_engine_and_its_lookups_agree(tmp_path: Path) -> None:
    found = figures("benchmarks.store", tmp_path, "--folder", str(tmp_path / "data"), has="", true="lookup_rows_equal")
    engines = [name for name in ("lmdb", "zarr") if found[f"{name}_measured"]]
    assert "lmdb" in engines
    for engine in engines:
        for tail in ("", "_400", "_32", "_400_32"):
            assert found[f"{engine}_load_ratio{tail}"] > 0
            assert found[f"{engine}_bytes_read_per_useful_byte{tail}"] >= 1
        for key in ("dump_ratio", "dump_ratio_32", "verify_ratio", "info_seconds", "heap_bytes", "file_bytes"):
            assert found[f"{engine}_{key}"] > 0
        assert found[f"lookup_rows_per_s_{engine}"] > 0
        assert found[f"{engine}_commit_blocks"] >= 24 * 48
        assert found[f"{engine}_commit_python_ms"] > 0
        for key, most in (("one_key_bytes", 1 << 16), ("small_over_rows", 3)):
            assert 0 < found[f"{engine}_{key}"] <= most
    assert found["load_bytes"] == (1 << 20) // 260 * 260
    assert found["lookup_keys"] == found["lookup_rows"] // 20
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.long
def test_embedding_step_measures_every_contender_and_every_optimizer(tmp_path: Path) -> None:
    keys = "version_torch speedup_vs_fbgemm speedup_vs_fbgemm_default"
    found = figures("benchmarks.embedding_step", tmp_path, has=keys)
    for tail in ("", "_default"):
        adam = () if tail else ("ours_adam", "torch_adam")
        for case in ("ours_adagrad", "ours_rowwise", "torch_adagrad", "by_hand_rowwise", *adam):
            assert found[f"ms_{case}_4xtiny{tail}"] > 0
        for key in ("speedup_vs_torch", "speedup_vs_torch_rowwise", "share_of_copy_bandwidth"):
            assert found[key + tail] > 0
    shares = [found[f"share_of_copy_bandwidth_{o}_4xtiny"] for o in ("adagrad", "rowwise", "adam")]
    assert found["share_of_copy_bandwidth"] == min(shares)


POOLS = ("pool_one", "pool_none", "pool_sum", "pool_mean", "pool_max", "pool_weighted")


def bytes_of_lookups(entries: int, dim: int, number: int) -> dict[str, int]:
    """Return the bytes that each lookup must move, for vectors with ``number`` bytes per number; bags have two ids."""
    one, bags, slots, to_step = 4 * dim * entries, entries // 2, 4 * entries, 8 * entries
    rows, pooled, offsets, id_to_slot = number * dim * entries, 4 * dim * bags, 8 * bags, 3 * slots
    of_bags = id_to_slot + to_step + offsets + rows + pooled
    return {
        "gather": slots + rows + one,
        "pool_one": id_to_slot + rows + one,
        "pool_none": id_to_slot + rows + one,
        "pool_sum": of_bags,
        "pool_mean": of_bags + 4 * entries,  # a factor
        "pool_max": of_bags + 4 * dim * bags,  # the entry of each element
        "pool_weighted": of_bags + 4 * entries + 4 * entries,  # weight and factor
        "weight_gradient": slots + offsets + rows + pooled + 4 * entries,
    }


def test_the_kernel_benchmark_measures_every_operation_at_every_dim(tmp_path: Path) -> None:
    found = figures("benchmarks.kernels", tmp_path, "--device", "cpu")
    rules = ("sgd", "adagrad", "rowwise", "adam")
    updates = [f"{form}_{rule}" for form in ("update", "sorted_update") for rule in rules]
    moves = (*POOLS, "gather", "weight_gradient", "pack", "unpack")
    ids = ("index_build", "index_find")
    for name in [*ids, *(f"{n}_{d}" for n in (*moves, *updates, "sort", "initial_rows") for d in (16, 32))]:
        assert found[f"ms_{name}"] > 0
        assert found[f"share_{name}"] > 0
    narrow = (*moves, *(f"update_{r}" for r in ("sgd", "adagrad", "adam")))
    for name in [f"{n}_{kind}_{d}" for n in narrow for kind in ("bf16", "fp16") for d in (16, 32)]:
        assert found[f"ms_{name}"] > 0
        assert found[f"share_{name}"] > 0
    entries, keys, places = found["num_samples"] * 26, 26 * 20, 1024
    assert found["bytes_update_adam_bf16_32"] == entries * (8 + 32 * 4) + found["distinct_rows"] * (8 + 2 * 32 * 10)
    assert found["bytes_update_adam_32"] == entries * (8 + 32 * 4) + found["distinct_rows"] * 2 * 3 * 32 * 4
    assert [found[f"bytes_{name}"] for name in ids] == [24 * keys + 16 * places, 28 * entries]
    for tail, number in (("", 4), ("_bf16", 2), ("_fp16", 2)):
        for dim in (16, 32):
            wanted = bytes_of_lookups(entries, dim, number)
            assert {name: found[f"bytes_{name}{tail}_{dim}"] for name in wanted} == wanted
            assert found[f"bytes_pack{tail}_{dim}"] == 300 * (8 + 2 * dim * (number + 4))
            assert found[f"bytes_unpack{tail}_{dim}"] == 300 * (4 + 2 * dim * (number + 4))
    assert found["share_gather_bf16"] == min(found[f"share_gather_bf16_{d}"] for d in (16, 32))
    assert found["share_pool"] == min(found[f"share_{n}_{d}"] for n in POOLS for d in (16, 32))
    assert found["share_sorted_update"] == min(found[f"share_sorted_update_{r}_{d}"] for r in rules for d in (16, 32))
    assert found["share_pool_verdict"] == found["share_sorted_update_verdict"] == "no verdict"


@pytest.mark.long
def test_the_kernel_benchmark_runs_every_operation_without_a_gpu(tmp_path: Path) -> None:
    found = figures("benchmarks.kernels", tmp_path, "--dry")
    assert found["operations_run_by_the_shim"] == 2 * (2 + 20 + 2 * (6 + 3 * len(OPTIMIZERS)))
    assert found["kernels_run_by_the_shim"] >= 24
    assert found.get("compiled_sm_90", 7) >= 7
    assert found["share_gather_verdict"] == "not measured"


@pytest.mark.long
def test_tables_of_language_models_keep_their_plan_and_their_bits(tmp_path: Path) -> None:
    found = figures(
        "benchmarks.ngram", tmp_path, "--folder", str(tmp_path / "data"),
        has="version_torch million_tokens_per_second keyset_speed_vs_duckdb throughput_ratio wait_fraction"
        " peak_over_limit memmap_tokens_per_second sparse_tokens_per_second rows_share",
        true="planned_equals_measured bits_equal",
    )  # fmt: skip
    assert found["passes"] > 8


@pytest.mark.parametrize(
    ("name", "tables", "inputs", "lookups", "gib"), [("tiny", 55, 58, 85, 4.19), ("small", 107, 116, 377, 26.29)]
)
def test_the_synthetic_models_are_as_published(name: str, tables: int, inputs: int, lookups: int, gib: float) -> None:
    model = MODELS[name]
    assert (model.num_tables, model.num_inputs, model.lookups) == (tables, inputs, lookups)
    assert round(model.weight_bytes / 2**30, 2) == gib
    schema = Data(name, TINY).schema()
    assert (len(schema.tables), len(schema.features)) == (tables, inputs)
    assert sum(feature.length or 1 for feature in schema.features) == lookups


def test_ids_follow_the_power_law_and_are_permuted() -> None:
    rows, count = 1000, 200_000
    drawn = np.bincount(permuted_power_law(np.random.default_rng(0), rows, count), minlength=rows)
    power = -0.05
    below = ((np.arange(rows + 1) + 1.0) ** power - 1) / ((rows + 1.0) ** power - 1)
    expected = np.diff(below) * count
    assert drawn.size == rows
    np.testing.assert_allclose(np.sort(drawn)[::-1][:50], expected[:50], rtol=0.15)
    order = np.argsort(-drawn)[:20]
    assert not (np.abs(np.diff(order)) == 1).any()
    assert set(permuted_power_law(np.random.default_rng(1), 2, 100).tolist()) == {0, 1}


def test_the_synthetic_models_run_in_memory_in_host_memory_and_on_disk(tmp_path: Path) -> None:
    found = figures(
        "benchmarks.synthetic_models", tmp_path, "--model", "tiny", "--device", "cpu",
        has="version_torch throughput_ratio_host wait_fraction_host throughput_ratio_disk wait_fraction_disk",
        true="planned_equals_measured_host planned_equals_measured_disk bits_equal_disk",
    )  # fmt: skip
    for key in ("ms_per_step", "ms_batch", "ms_per_step_kept", "ms_per_step_host", "ms_per_step_disk"):
        assert found[key] > 0
    for part in ("host", "disk"):
        assert found[f"device_bytes_{part}"] <= found["device_budget_bytes"]
        assert found[f"bound_{part}"] in ("memory", "disk", "link")
    assert found["bound_ratio"] == min(found["bound_ratio_host"], found["bound_ratio_disk"])
    assert 0 < found["device_share_of_model"] < found["device_share"] < 1
    assert found["store_bytes_written_disk"] > 0
    assert found["rows_read_host"] == found["store_bytes_written_host"] == 0
    assert found["ms_per_step_verdict"] == "no verdict"
    assert not list(ROOT.glob("synthetic_models-*"))


@pytest.mark.long
def test_the_synthetic_models_run_without_a_gpu(tmp_path: Path) -> None:
    facts = "planned_equals_measured_disk bits_equal_disk"
    found = figures("benchmarks.synthetic_models", tmp_path, "--model", "tiny", "--dry", true=facts)
    assert (found["device"], found["ms_per_step_verdict"]) == ("shim", "no verdict")


def test_the_fewest_rows_are_those_of_every_cache_that_could_have_been_chosen() -> None:
    """Row by row, farthest next use first reads no more rows than the best of all choices, and no fewer."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        passes = [np.unique(rng.integers(0, 7, rng.integers(1, 5))) for _ in range(4)]
        capacities = [int(c) for c in rng.integers(0, 4, 9)]
        assert sum(fewest_rows_read(passes, capacities, 1)) == _best_of_all_choices(passes, capacities)


def _best_of_all_choices(passes: list[Any], capacities: list[int]) -> int:
    from itertools import combinations

    costs: dict[frozenset[int], int] = {frozenset(): 0}
    last: dict[int, int] = {}
    for pass_index, capacity in enumerate(capacities):
        needed = [int(k) for k in passes[pass_index % len(passes)]]
        old = {k for k in needed if k in last and last[k] < pass_index - 2}
        last |= dict.fromkeys(needed, pass_index)
        dumped = {k for k, v in last.items() if v == pass_index - 2}
        after: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            paid = cost + len(old - held)
            candidates = sorted((held - set(needed)) | dumped)
            for content in combinations(candidates, min(capacity, len(candidates))):
                key = frozenset(content)
                after[key] = min(paid, after.get(key, paid))
        costs = after
    return min(costs.values())


@pytest.mark.parametrize(
    ("value", "below", "verdict"),
    [
        (0.98, False, "goal"), (0.95, False, "least"), (0.5, False, "missed"), (None, False, "not measured"),
        (0.9, True, "goal"), (0.96, True, "missed"),
    ],
)  # fmt: skip
def test_a_figure_is_judged_by_its_goal(value: float | None, below: bool, verdict: str) -> None:
    goal = Goal(key="x", goal=0.9, below=True) if below else Goal(key="x", goal=0.97, least=0.93)
    assert goal.verdict(value) == verdict


@pytest.mark.long
def test_a_table_in_little_memory_is_resumed_and_exported_as_it_was_trained(tmp_path: Path) -> None:
    facts = "bits_equal overlay_equal untouched_equal planned_equals_measured"
    found = figures("benchmarks.ngram_table", tmp_path, "--folder", str(tmp_path / "data"), true=facts)
    assert found["rows_begun"] == found["touched_rows"] == found["overlay_rows"]


def test_the_page_of_results_is_what_the_files_say() -> None:
    text, found = results_page.PAGE.read_text(), results_page.results()
    assert text == results_page.page(), "run python -m benchmarks.results_page"
    assert [one.path.name for one in found if f"({results_page.LINK}{one.path.name})" not in text] == []
    kinds = [(one.command, one.has_gpu) for one in found]
    assert len(kinds) == len({*kinds})
