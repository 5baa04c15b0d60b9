"""benchmarks.gpu runs its parts under limits and keeps each one's results; benchmarks.gpu_idle counts calls."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_idle
from benchmarks.gpu_step import DRY, roof_bytes
from benchmarks.idle_gpu import IdleGpu

pytestmark = pytest.mark.disk

ROOT = Path(__file__).parents[1]
WITHOUT = """
import sys
sys.modules["lmdb"] = sys.modules["zarr"] = None
from benchmarks.gpu import main
sys.exit(main(sys.argv[1:]))
"""


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.iterdir()}


@pytest.mark.long
def test_every_part_runs_without_a_gpu_and_writes_its_figures(tmp_path: Path) -> None:
    run("-m", "benchmarks.gpu", str(tmp_path), "--dry")
    found = figures(tmp_path)
    assert {name: one["ended"] for name, one in found.items()} == dict.fromkeys(gpu.PARTS, "done")
    assert not [key for one in found.values() for key, value in one.items() if isinstance(value, dict | list)]
    for optimizer in ("sgd", "adam", "adagrad", "rowwise"):
        for module in ("bags", "rows"):
            for key in ("gpu_ms", "roof_fraction", "wall_ms", "host_ms", "synced_ms"):
                assert found["step"][f"{optimizer}_{module}_{key}"] > 0
        assert found["step"][f"{optimizer}_roof_MB"] == pytest.approx(roof_bytes(DRY, optimizer) / 1e6)
    for part, keys in {
        "env": ("copy_TB_per_second", "version_torch"),
        "link": ("to_device_GB_per_second", "to_host_GB_per_second"),
        "stream": ("adam_fresh_ms", "adam_resident_wall_ms", "sgd_fresh_ms", "sgd_resident_wall_ms"),
        "peers": ("torch_adagrad_gpu_ms", "torch_adam_gpu_ms"),
        "register": ("1MiB_idle_pin_ms", "1MiB_busy_longest_launch_ms"),
        "switch": ("both_GB_per_second_1_blocks", "pack_GB_per_second_8_blocks"),
        "fresh": ("prefetch_0_ms", "prefetch_4_process_ms", "kept_wall_ms"),
        "host": ("bags_calls", "rows_calls"),
        "merlin": ("tiny_ms_per_step", "small_ms_per_step_kept"),
        "out_of_core": ("throughput_ratio_high", "planned_equals_measured_high"),
        "ngram": ("throughput_ratio", "rows_share"),
    }.items():
        assert not [key for key in keys if key not in found[part]], part
    assert found["tests"]["status"] == 0
    assert found["racecheck"]["status"] == found["ncu"]["status"] == "not run: needs a GPU"


@pytest.mark.long
def test_parts_that_need_no_store_run_without_lmdb_and_zarr(tmp_path: Path) -> None:
    run("-c", WITHOUT, str(tmp_path), "env", "link", "step", "register", "switch", "--dry")
    found = figures(tmp_path)
    assert {one["ended"] for one in found.values()} == {"done"}
    assert "version_lmdb" in found["env"], "it is installed, and was not imported"


def cut_part(_machine: Any, keep: gpu.Keep) -> None:
    keep({"found": 1})
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    keep({"found": 2, "pid": started.pid})
    time.sleep(600)


def bad_part(_machine: Any, keep: gpu.Keep) -> None:
    keep({"found": 1})
    raise ValueError("no such GPU")


def test_a_part_that_is_cut_keeps_its_results_and_ends_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.PARTS, "env", gpu.Part(cut_part, 2))
    assert gpu.main([str(tmp_path), "env", "ncu", "--dry"]) == 1
    found = figures(tmp_path)
    assert (found["env"]["ended"], found["env"]["found"], found["ncu"]["ended"]) == ("cut", 2, "done")
    status = Path(f"/proc/{found['env']['pid']}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_a_part_that_fails_says_why_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.PARTS, "env", gpu.Part(bad_part, 20))
    assert gpu.main([str(tmp_path), "env", "ncu", "--dry"]) == 1
    found = figures(tmp_path)
    assert found["env"] == {"ended": "failed", "seconds": found["env"]["seconds"], "found": 1,
                            "error": "ValueError: no such GPU"}  # fmt: skip
    assert found["ncu"]["ended"] == "done"


def test_parts_end_when_the_time_of_all_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MOST_SECONDS", 3)
    monkeypatch.setitem(gpu.PARTS, "env", gpu.Part(cut_part, 60))
    assert gpu.main([str(tmp_path), "env", "ncu", "--dry"]) == 1
    assert {name: one["ended"] for name, one in figures(tmp_path).items()} == {"env": "cut"}


def test_a_part_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([str(tmp_path / "out"), "steps"])
    assert "unknown part 'steps': expected one of env, link, step" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_step_of_the_goal_moves_the_bytes_that_its_roof_says() -> None:
    entries, dim = DRY.num_entries, DRY.dim
    moved = {optimizer: roof_bytes(DRY, optimizer) for optimizer in ("sgd", "adagrad", "rowwise", "adam")}
    distinct = (moved["adagrad"] - moved["sgd"]) / (8 * dim)
    assert 0 < distinct < entries
    assert moved["sgd"] == pytest.approx(4 * entries + 4 * dim * (2 * entries + 3 * distinct))
    assert moved["adam"] - moved["adagrad"] == pytest.approx(8 * dim * distinct)
    assert moved["rowwise"] - moved["sgd"] == pytest.approx(8 * distinct)


def test_a_step_over_an_idle_gpu_is_counted_and_waits_for_nothing(tmp_path: Path) -> None:
    """The quick form has every key; counts are facts."""
    path = tmp_path / "figures.json"
    assert "what was promised" in run("-m", "benchmarks.gpu_idle", "--quick", "--json", str(path))
    found = json.loads(path.read_text())
    for case in gpu_idle.CASES:
        assert found[f"python_us_{case}"] > 0
        assert found[f"python_calls_{case}"] > 100
        assert found[f"launches_{case}"] >= 3, "pool or gather, stretches and an update"
        assert found[f"waits_{case}"] == 0
    assert found["aten_ops_bags"] < found["aten_ops_rows"]
    assert found["launches_groups"] == 5, "pool, and stretches and an update, of quick rows and of others: all at once"
    assert found["copies_maker"] > 0
    assert found["waits_maker"] == 0
    assert found["launches_maker"] == 4, "keys, a sort, and runs in two: at once, whatever modules look up"
    for key in ("maker_us", "fresh_over_kept", "switch_us_per_part", "switch_us_per_part_16k", "python_us_nothing"):
        assert found[key] > 0


def test_an_idle_gpu_gives_memory_again_when_no_tensor_uses_it() -> None:
    """A GPU without work frees memory like torch's caching allocator: a view, or a shared tensor, keeps it."""
    gpu = IdleGpu()
    first = gpu.tensor((4,), torch.float32)
    address, view = first.data_ptr(), first[1:]
    del first
    other = gpu.tensor((4,), torch.float32)
    assert other.data_ptr() != address
    del view
    again = gpu.tensor((4,), torch.float32)
    assert again.data_ptr() == address
    assert gpu.tensor((4,), torch.int32).data_ptr() not in (address, other.data_ptr())
    assert gpu.counts["allocate"] == 4


def test_a_part_writes_whole_files_or_none(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    gpu.write(path, {"a": 1})
    assert gpu.limited(partial(_write_and_fail, path), 20) == "failed"
    assert json.loads(path.read_text()) == {"a": 1}


def _write_and_fail(path: Path) -> None:
    gpu.write(path, {"a": _Unwritable()})


class _Unwritable:
    def __str__(self) -> str:
        raise ValueError("cannot be written")
