"""Tables as values."""

import json
from typing import Any

import pytest

from tiercache.store.bits import xxh64
from tiercache.store.initializer import Constant, Normal, Uniform, Zeros, initializer_code
from tiercache.store.optimizer import SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, RowWiseAdam, RowWiseRMSprop
from tiercache.store.table import Table, group_tables


def table(**changes: Any) -> Table:
    values: dict[str, Any] = {"name": "t", "dim": 4, "optimizer": SGD(learning_rate=0.1), "initializer": Zeros()}
    return Table(**values | changes)


def copied(made: Table) -> Table:
    """Return the table of a table's record, through JSON."""
    return Table.from_record(json.loads(json.dumps(made.to_record())))


@pytest.mark.parametrize(
    ("optimizer", "fields", "row_bytes"),
    [
        (SGD(learning_rate=0.1), [("vector", 4, 0)], 16),
        (Adagrad(learning_rate=0.1, initial_accumulator=0.5), [("vector", 4, 0), ("sum", 4, 0.5)], 32),
        (RowWiseAdagrad(learning_rate=0.1), [("vector", 4, 0), ("sum", 1, 0)], 20),
        (Adam(), [("vector", 4, 0), ("exp_avg", 4, 0), ("exp_avg_sq", 4, 0)], 48),
        (SGD(momentum=0.5), [("vector", 4, 0), ("momentum_buffer", 4, 0)], 32),
        (RowWiseAdam(), [("vector", 4, 0), ("exp_avg", 4, 0), ("exp_avg_sq", 1, 0)], 36),
        (RowWiseRMSprop(), [("vector", 4, 0), ("square_avg", 1, 0)], 20),
    ],
)
def test_a_row_is_the_vector_and_the_optimizer_state(
    optimizer: Optimizer, fields: list[tuple[str, int, float]], row_bytes: int
) -> None:
    made = table(optimizer=optimizer)
    assert [(f.name, f.width, f.initial) for f in made.fields] == fields
    assert made.row_bytes == row_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("dim", "row_bytes"), [(1, 8), (4, 24), (5, 32)])
def test_a_vector_of_16_bits_is_padded_to_words_and_the_state_is_float32(dtype: str, dim: int, row_bytes: int) -> None:
    """So the state begins at a multiple of 4 bytes."""
    made = table(dim=dim, dtype=dtype, optimizer=Adagrad(learning_rate=0.1))
    assert made.row_bytes == row_bytes
    assert [field.dtype for field in made.fields] == [dtype, "float32"]
    assert copied(made) == made
    assert len(group_tables([made, table(name="other", dim=dim, optimizer=made.optimizer)])) == 2


def test_the_table_id_is_the_hash_of_the_name() -> None:
    assert table(name="größe", dim=7).table_id == xxh64("größe".encode())


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(learning_rate=1), Adagrad(learning_rate=0.1), Adam(beta1=0.8), SGD(momentum=0.5, nesterov=True),
        Adam(decoupled=True, decay=0.1), RowWiseAdam(), Adam(corrected_eps=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "initializer", [Zeros(), Constant(value=0.3), Uniform(low=-1, high=0.1), Normal(mean=1, std=0)]
)
def test_a_record_gives_the_same_table_back(optimizer: Optimizer, initializer: Any) -> None:
    made = table(optimizer=optimizer, initializer=initializer, seed=2**64 - 1)
    assert copied(made) == made
    assert copied(made).fields == made.fields


def test_a_setting_that_is_new_is_in_no_record_without_it() -> None:
    """Digests of schemas and manifests stay as they were."""
    assert "corrected_eps" not in table(optimizer=Adam()).to_record()["optimizer"]
    assert table(optimizer=Adam(corrected_eps=True)).to_record()["optimizer"]["corrected_eps"] is True


def test_a_normal_that_fits_is_taken_and_a_table_that_is_there_is_read() -> None:
    """Even if its record could draw numbers that are refused in a new table."""
    assert table(dtype="float16", initializer=Normal(mean=-1e3, std=8e3)).dtype == "float16"
    assert table(initializer=Normal(std=1e38)).dtype == "float32"
    record = table(dtype="float16", initializer=Normal(mean=1.0)).to_record()
    record["initializer"]["std"] = 9e3
    again = Table.from_record(record)
    assert again.initializer == Normal(mean=1.0, std=9e3)
    assert again.to_record() == record
    with pytest.raises(ValueError, match="mean of table 't' is 70000"):
        Table.from_record({**record, "initializer": {"kind": "normal", "mean": 7e4, "std": 1.0}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": ""}, "expected a non-empty string"),
        ({"name": 3}, "expected a non-empty string"),
        ({"name": "a\nb"}, "unprintable"),
        ({"dim": 0}, "whole number >= 1"),
        ({"dim": 2.0}, "whole number >= 1"),
        ({"dim": True}, "whole number >= 1"),
        ({"optimizer": "adam"}, "must be one of SGD, Adagrad"),
        ({"initializer": 0}, "must be Uniform, Normal, Zeros, Constant or Checkpoint"),
        ({"seed": -1}, "must be 0 .. 2"),
        ({"seed": 2**64}, "must be 0 .. 2"),
        ({"dtype": "float64"}, "must be 'float32', 'bfloat16' or 'float16'"),
        ({"dtype": "float16", "initializer": Uniform(low=-1e5, high=0.0)}, "low .* is infinite in float16"),
        ({"dtype": "float16", "initializer": Normal(std=9e3)}, "reaches 72000 at 8 deviations .* infinite in float16"),
        (
            {"dtype": "float16", "initializer": Normal(mean=-6e4, std=1e3)},
            "reaches 68000 .* use a smaller std or mean",
        ),
        ({"dtype": "bfloat16", "initializer": Normal(std=1e38)}, "infinite in bfloat16"),
    ],
)
def test_a_bad_table_is_refused_in_words(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        table(**changes)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (SGD, {"learning_rate": float("nan")}),
        (SGD, {"learning_rate": -1.0}),
        (SGD, {"learning_rate": 0.1, "decay": -0.1}),
        (SGD, {"momentum": 1.0}),
        (SGD, {"nesterov": True}),
        (SGD, {"momentum": 0.5, "nesterov": 0.0}),
        (Adagrad, {"learning_rate": 0.1, "initial_accumulator": -1.0}),
        (Adagrad, {"learning_rate": float("inf")}),
        (Adam, {"beta1": 1.0}),
        (Adam, {"eps": True}),
        (Adam, {"decoupled": 1}),
        (RowWiseAdam, {"beta2": -0.1}),
        (RowWiseRMSprop, {"alpha": 1.0}),
        (Uniform, {"low": 1.0, "high": 0.0}),
        (Uniform, {"low": float("-inf"), "high": 0.0}),
        (Normal, {"std": -1.0}),
        (Constant, {"value": "0"}),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r" is | runs "):
        make(**settings)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"optimizer": {"kind": "lion"}}, "'lion' is unknown: expected one of sgd, adagrad"),
        ({"optimizer": {"kind": "sgd", "speed": 1}}, "has no 'speed'"),
        ({"initializer": {"kind": "constant"}}, "lacks 'value'"),
        ({"initializer": "zeros"}, "expected a record of kind zeros"),
        ({"dim": None}, "whole number"),
    ],
)
def test_a_record_of_something_else_is_refused(record: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Table.from_record(table().to_record() | record)


def test_a_record_without_a_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks 'seed'"):
        Table.from_record({name: value for name, value in table().to_record().items() if name != "seed"})


def test_tables_of_one_layout_make_a_group() -> None:
    """Groups and their tables are in the order of table ids; rows of a group step alike."""
    assert len(group_tables([table(name="a"), table(name="b", optimizer=SGD(learning_rate=0.2))])) == 2
    tables = [table(name=name, dim=dim) for name, dim in [("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 3)]]
    groups = group_tables(tables)
    assert groups == group_tables(reversed(tables))
    assert [group.index for group in groups] == [0, 1, 2]
    firsts = [group.tables[0].table_id for group in groups]
    assert firsts == sorted(firsts)
    for group in groups:
        assert list(group.tables) == sorted(group.tables, key=lambda one: one.table_id)
        assert {(one.dim, one.optimizer) for one in group.tables} == {(group.dim, group.optimizer)}
        assert group.row_bytes == 4 * group.dim
        assert [group.place(one.name) for one in group.tables] == [*range(len(group.tables))]
    with pytest.raises(KeyError):
        groups[0].place("z")


def test_no_tables_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        group_tables([])
    with pytest.raises(ValueError, match="two tables are named 't'"):
        group_tables([table(), table(dim=2)])


def test_initializers_have_codes_for_kernels() -> None:
    assert initializer_code(Zeros()) == (0, 0.0, 0.0)
    assert initializer_code(Constant(value=2)) == (1, 2.0, 0.0)
    assert initializer_code(Uniform(low=-1, high=1)) == (2, -1.0, 1.0)
    assert initializer_code(Normal(mean=3, std=4)) == (3, 3.0, 4.0)


def test_a_column_slice_is_recorded_and_a_whole_table_does_not_speak_of_slices() -> None:
    """So stores of whole tables do not change."""
    part = table(dim=3, first_column=4, whole_dim=8)
    assert copied(part) == part != table(dim=3)
    assert part.fields == table(dim=3).fields
    assert not {"first_column", "whole_dim"} & table().to_record().keys()


@pytest.mark.parametrize(
    ("first", "whole"), [(0, 3), (5, 8), (-1, 8), (1, None), (0, "8"), (1.0, 8), (True, 8), (0, 4)]
)
def test_columns_that_are_no_slice_are_refused(first: Any, whole: Any) -> None:
    words = "omit whole_dim" if whole == 4 else "must lie within the whole"
    columns = {"first_column": first, "whole_dim": whole}
    with pytest.raises(ValueError, match=words):
        table(**columns)
    with pytest.raises(ValueError, match=words):
        Table.from_record(table().to_record() | columns)


@pytest.mark.parametrize(
    ("optimizer", "groups"), [(Adagrad(learning_rate=0.1), 1), (RowWiseAdagrad(learning_rate=0.1), 3)]
)
def test_slices_share_a_group_unless_a_number_of_theirs_is_for_all_slices(optimizer: Optimizer, groups: int) -> None:
    """Row-wise Adagrad has one sum for the whole row, which its slices share."""
    columns: list[dict[str, int]] = [{"whole_dim": 8}, {"whole_dim": 8, "first_column": 4}, {}, {}]
    tables = [table(name=name, optimizer=optimizer, **part) for name, part in zip("abcd", columns, strict=True)]
    assert len(group_tables(tables)) == groups
