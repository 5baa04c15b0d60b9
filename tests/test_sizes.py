"""Sizes in bytes as people write them."""

import numpy as np
import pytest

from tiercache.sizes import distinct_sizes, format_bytes, option_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512", 512), ("64MiB", 64 << 20), ("1.5 KiB", 1536), ("17.9GiB", 19_219_978_649), ("8GB", 8 * 10**9),
        ("2k", 2000), ("4.02 KB", 4020), ("9007199.254740993GB", 9_007_199_254_740_993), ("1 gib", 1 << 30),
        (7, 7), (np.int64(7), 7),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_mean_them(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1.5", "64 MiBs", "1e6", 0, -3, True, 2.0, "0", "12iB", "9" * 5000, "0.0001k"]
)
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="invalid size"):
        parse_bytes(text)  # type: ignore[arg-type]
    assert [parse_bytes(none, least=0) for none in (0, "0", "0 MiB")] == [0, 0, 0]


def test_sizes_are_shown_with_three_digits() -> None:
    shown = {1: "1 bytes", 999: "999 bytes", 1 << 20: "1 MiB", 3 << 29: "1.5 GiB", 5 << 50: "5,120 TiB"}
    assert {size: format_bytes(size) for size in shown} == shown


def test_two_sizes_that_look_alike_are_told_to_the_byte() -> None:
    """Others are rounded."""
    assert distinct_sizes(1 << 20, 3 << 20) == ("1 MiB", "3 MiB")
    assert distinct_sizes((1 << 20) + 1, 1 << 20) == ("1,048,577 bytes", "1,048,576 bytes")
    assert distinct_sizes(1 << 20, 1 << 20) == ("1 MiB", "1 MiB")


@pytest.mark.parametrize(("num_bytes", "text"), [(1, "1"), (1 << 20, "1MiB"), (3 << 29, "1536MiB"), (10**6, "1000000")])
def test_a_size_is_written_so_that_it_is_read_as_it_is(num_bytes: int, text: str) -> None:
    assert option_bytes(num_bytes) == text
    assert parse_bytes(text) == num_bytes
