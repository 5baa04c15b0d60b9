"""Resources of a cubin's kernels: registers per thread, and stack bytes, to which registers spill."""

import struct
from typing import NamedTuple

_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12
_WITH_SIZE = 4  # the format of an attribute that has a size, and the others, which have a value of 2 bytes


class Kernel(NamedTuple):
    registers: int
    stack_bytes: int


def end_of(cubin: bytes) -> int:
    (begin,), (size, count) = struct.unpack_from("<Q", cubin, 32), struct.unpack_from("<HH", cubin, 54)
    return int(begin + size * count)


def kernels_of(cubin: bytes) -> dict[str, Kernel]:
    """Return the kernels of an ELF file of CUDA, by name: from its symbols and its section .nv.info."""
    first, size, count, names_at = (
        *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58),
    )  # fmt: skip
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, first + i * size) for i in range(count)]

    def text(table: int, at: int) -> str:
        begin = sections[table][4] + at
        return cubin[begin : cubin.index(b"\0", begin)].decode()

    by_name = {text(names_at, section[0]): section for section in sections}
    symbols, info = by_name[".symtab"], by_name[".nv.info"]
    registers, stack = dict[str, int](), dict[str, int]()
    at, end = info[4], info[4] + info[5]
    while at < end:
        kind, attribute, length = struct.unpack_from("<BBH", cubin, at)
        if kind == _WITH_SIZE and attribute in {_REGISTERS, _FRAME, _STACK}:
            number, value = struct.unpack_from("<II", cubin, at + 4)
            (offset,) = struct.unpack_from("<I", cubin, symbols[4] + 24 * number)
            name = text(symbols[6], offset)
            if attribute == _REGISTERS:
                registers[name] = value
            else:
                stack[name] = max(value, stack.get(name, 0))
        at += 4 + (length if kind == _WITH_SIZE else 0)
    return {name: Kernel(count, stack.get(name, 0)) for name, count in registers.items()}
