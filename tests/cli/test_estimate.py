"""``tiercache estimate``."""

import json

import pytest

import tiercache as tc
from tests.cli.command import invoke
from tiercache.store.optimizer import KINDS

ONE = ("estimate", "--rows", "1e6", "--dim", "64", "--samples", "2e6", "--passes", "10", "--disk-gbps", "1")


def test_the_command_prints_what_the_function_returns() -> None:
    tables = [
        tc.Table(name="user", dim=64, optimizer=tc.optim.Adam(), dtype="float16"),
        tc.Table(name="a:b", dim=8, optimizer=tc.optim.Adam(), dtype="float16"),
    ]
    found = tc.estimate(
        tables, {"user": 1e6, "a:b": 1000}, samples=2e6, keys_per_sample={"user": 1, "a:b": 4.5}, dense=13, epochs=3,
        zipf=0.9, device_budget="64MiB", host_budget="1GiB", commit_every=2, retention=2, samples_per_second=1e5,
        disk_gbps=2, link_gbps=5,
    )  # fmt: skip
    options = (
        "--table", "user:1e6:64", "--table", "a:b:1000:8:4.5", "--samples", "2e6", "--dense", "13", "--epochs", "3",
        "--zipf", "0.9", "--device-budget", "64MiB", "--host-budget", "1GiB", "--commit-every", "2", "--retention", "2",
        "--samples-per-second", "1e5", "--disk-gbps", "2", "--link-gbps", "5",
        "--optimizer", "adam", "--dtype", "float16",
    )  # fmt: skip
    ended = invoke("estimate", *options, "--json")
    assert ended.exit_code == 0
    record = json.loads(ended.stdout)
    rates = {"rates": record["rates"] | {"copy": found.rates.copy_}}  # measured each time
    assert record | rates == json.loads(json.dumps(found.to_record()))
    shown = invoke("estimate", *options)
    assert shown.exit_code == 0
    for figure in found.figures:
        assert figure.name in shown.stdout
    assert "assumed: the store does not include dense state" in shown.stdout
    assert invoke("estimate", *options, "--quiet").stdout == ""


@pytest.mark.parametrize("optimizer", KINDS)
def test_every_optimizer_has_the_bytes_of_its_rows(optimizer: str) -> None:
    found = json.loads(invoke(*ONE, "--optimizer", optimizer, "--json").stdout)
    row = tc.Table(name="t", dim=64, optimizer=KINDS[optimizer]()).row_bytes
    assert found["device_bytes"] == found["rows_per_pass"] * (row + 28)
    assert found["bytes_written"] == found["passes"] * found["rows_per_pass"] * (row + 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rows", "1e6"), "Missing option '--samples'"),
        (("--samples", "1e6"), "pass --rows, for one table, or --table for each: NAME:ROWS:DIM"),
        (("--samples", "1e6", "--rows", "5", "--table", "a:5:16"), "pass --rows, for one table, or --table for each"),
        (("--samples", "1e6", "--table", "user"), "--table is 'user': expected NAME:ROWS:DIM"),
        (("--samples", "1e6", "--table", "user:1e3:x"), "--table is 'user:1e3:x': expected NAME:ROWS:DIM"),
        (("--samples", "1e6", "--table", "a:5:16", "--dim", "64"), "--dim and --keys-per-sample are for the table of"),
        (("--samples", "1e6", "--table", "a:5:16", "--keys-per-sample", "1"), "write them in --table: NAME:ROWS:DIM"),
        (("--samples", "many", "--rows", "5"), "--samples is 'many': expected a number, such as 2e9"),
        (("--samples", "-1e6", "--rows", "5"), "samples is -1000000.0: expected a whole number of at least 1"),
        (("--samples", "1e6", "--rows", "5", "--dim", "0"), "dim of table 'table' is 0"),
        (("--samples", "1e6", "--rows", "5", "--optimizer", "lion"), "optimizer 'lion' is unknown: expected one of"),
        (("--samples", "1e6", "--rows", "5", "--dtype", "int8"), "dtype of table 'table' is 'int8'"),
        (("--samples", "1e6", "--rows", "5", "--device-budget", "much"), "invalid size 'much'"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_one_line(options: tuple[str, ...], words: str) -> None:
    ended = invoke("estimate", *options)
    assert ended.exit_code in {1, 2}
    assert words in " ".join(ended.stderr.split()), ended.stderr


def test_warnings_of_the_machine_are_on_standard_error() -> None:
    ended = invoke("estimate", "--rows", "1e10", "--samples", "1e11", "--passes", "200", "--disk-gbps", "2", "--json")
    assert ended.exit_code == 0
    assert json.loads(ended.stdout)["warnings"]
    assert "warning: store and dataset of" in ended.stderr
