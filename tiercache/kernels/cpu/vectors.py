"""Vectors in memory, of float32 or of a 16-bit dtype, which kernels see as float32.

Legend: S slots, D dim, P numbers from one row to the next: D, or for 16-bit dtypes D rounded up to an even number.

Kernels have one source, and a specialization for each width. bfloat16 and float16 share one and are distinguished by a
number: the few extra instructions are hidden by memory latency. In generated code, "16-bit or not" is a constant:
float32 kernels have no code for 16 bits.
"""

import functools
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba import types

from tiercache.kernels.cpu.compile import inlined
from tiercache.kernels.cpu.simd import (
    WIDTH,
    Elements,
    emitted,
    lanes,
    masked_load,
    masked_store,
    prefetch,
    prefetch_span,
)

_LONG, _WORD, _SHORT, _FLOAT = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.FloatType()


def _is_16_bits(array: Elements) -> bool:
    return bool(array.type.dtype == types.uint16)


@emitted(types.boolean, Elements)
def is_narrow(_builder: Any, values: Elements) -> Any:
    """Return True if an array has 16-bit numbers: a constant, so that branches on it are not in the machine code."""
    return ir.Constant(ir.IntType(1), int(_is_16_bits(values)))


def _wide(kind: Any, width: int) -> Any:
    return ir.VectorType(kind, width) if width > 1 else kind


def _constant(width: int, number: float, kind: Any = _WORD) -> Any:
    return ir.Constant(_wide(kind, width), [number] * width if width > 1 else number)


def _has_halves() -> bool:
    """Return True if the CPU converts float16 to float32; other CPUs lack the function that LLVM would call."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("f16c", False)) or llvm.get_process_triple().startswith(("aarch64", "arm64"))


def _widen(builder: Any, bits: Any, is_half: Any, width: int) -> Any:
    """Return 16-bit numbers as float32."""
    floats = _wide(_FLOAT, width)
    word = builder.zext(bits, _wide(_WORD, width))
    brain = builder.bitcast(builder.shl(word, _constant(width, 16)), floats)
    if _has_halves():
        half = builder.fpext(builder.bitcast(bits, _wide(ir.HalfType(), width)), floats)
    else:
        half = builder.bitcast(_half_bits(builder, word, width), floats)
    return builder.select(builder.icmp_unsigned("!=", is_half, ir.Constant(is_half.type, 0)), half, brain)


def _half_bits(builder: Any, word: Any, width: int) -> Any:
    """Return the float32 bits of float16 bits, in integer arithmetic."""
    shared: Any = functools.partial(_constant, width)
    exponent = builder.and_(word, shared(0x7C00))
    shifted = builder.shl(builder.and_(word, shared(0x7FFF)), shared(13))
    raised = builder.select(builder.icmp_unsigned("==", exponent, shared(0x7C00)), shared(224 << 23), shared(112 << 23))
    small = builder.uitofp(builder.and_(word, shared(0x3FF)), _wide(_FLOAT, width))
    small = builder.bitcast(builder.fmul(small, _constant(width, 2.0**-24, _FLOAT)), shifted.type)
    is_small = builder.icmp_unsigned("==", exponent, shared(0))
    sign = builder.shl(builder.and_(word, shared(0x8000)), shared(16))
    return builder.or_(builder.select(is_small, small, builder.add(shifted, raised)), sign)


def _round(builder: Any, value: Any, noise: Any, is_half: Any) -> Any:
    """Return sixteen float32 as 16-bit numbers; ``noise`` (16 random bits each, as words) selects the neighbor."""
    shared: Any = functools.partial(_constant, WIDTH)
    words = _wide(_WORD, WIDTH)
    bits = builder.bitcast(value, words)
    size = builder.and_(bits, shared(0x7FFFFFFF))
    sign = builder.and_(builder.lshr(bits, shared(16)), shared(0x8000))
    is_nan = builder.icmp_unsigned(">", size, shared(0x7F800000))
    is_special = builder.icmp_unsigned(">=", size, shared(0x7F800000))
    zero = shared(0)
    # bfloat16: the upper half, after random bits were added to the lower one
    brain = builder.lshr(builder.add(size, builder.select(is_special, zero, noise)), shared(16))
    brain = builder.or_(brain, builder.select(is_nan, shared(0x0040), zero))
    # float16 from 2^-14 on: the same with the lower 13 bits; below, in steps of 2^-24
    half = builder.lshr(builder.add(size, builder.lshr(noise, shared(3))), shared(13))
    half = builder.sub(half, shared(112 << 10))
    half = builder.select(builder.icmp_unsigned("<", half, shared(0x7C00)), half, shared(0x7C00))
    is_small = builder.icmp_unsigned("<", size, shared(0x38800000))
    steps = builder.bitcast(builder.select(is_small, size, zero), value.type)
    steps = builder.fptosi(builder.fmul(steps, _constant(WIDTH, 2.0**40, _FLOAT)), words)
    half = builder.select(is_small, builder.lshr(builder.add(steps, noise), shared(16)), half)
    special = builder.select(
        is_nan, builder.or_(builder.and_(builder.lshr(bits, shared(13)), shared(0x3FF)), shared(0x7E00)), shared(0x7C00)
    )
    half = builder.select(is_special, special, half)
    chosen = builder.select(builder.icmp_unsigned("!=", is_half, ir.Constant(is_half.type, 0)), half, brain)
    return builder.trunc(builder.or_(chosen, sign), _wide(_SHORT, WIDTH))


@emitted(lanes, Elements, types.intp, types.intp, types.intp)
def _load_lanes(builder: Any, values: Elements, is_half: Any, offset: Any, count: Any) -> Any:
    """Return `count` numbers from `offset` on as float32; the others are zero."""
    bits = masked_load(builder, values, offset, count)
    return _widen(builder, bits, is_half, WIDTH) if _is_16_bits(values) else bits


@emitted(types.float32, Elements, types.intp, types.intp)
def _load_one(builder: Any, values: Elements, is_half: Any, offset: Any) -> Any:
    """Return one number as float32."""
    number = builder.load(values.address(builder, offset))
    return _widen(builder, number, is_half, 1) if _is_16_bits(values) else number


@emitted(types.void, Elements, types.intp, types.intp, lanes, types.intp, Elements, types.intp)
def _store_rounded(
    builder: Any, values: Elements, is_half: Any, offset: Any, value: Any, count: Any, noise: Elements, noise_at: Any
) -> None:
    """Round sixteen float32, each by its 16-bit number of `noise` from `noise_at` on; write `count`."""
    if _is_16_bits(values):
        first = builder.bitcast(noise.address(builder, _LONG(0)), _SHORT.as_pointer())
        address = builder.bitcast(builder.gep(first, [noise_at]), _wide(_SHORT, WIDTH).as_pointer())
        drawn = builder.zext(builder.load(address, align=2), _wide(_WORD, WIDTH))
        value = _round(builder, value, drawn, is_half)
    masked_store(builder, values, offset, value, count)


@inlined
def shape_of(vectors):  # type: ignore[no-untyped-def]
    """Return dim, and the numbers from one row to the next."""
    stride = vectors.values.shape[1]
    return (vectors.dim if is_narrow(vectors.values) else stride), stride


@inlined
def read(vectors, at, count):  # type: ignore[no-untyped-def]
    """Return `count` numbers, 16 at most, from `at` on as float32; the others are zero."""
    return _load_lanes(vectors.values, vectors.is_half, at, count)


@inlined
def element(vectors, at):  # type: ignore[no-untyped-def]
    """Return the number at `at` as float32."""
    return _load_one(vectors.values, vectors.is_half, at)


@inlined
def write_rounded(vectors, at, value, count, noise, noise_at):  # type: ignore[no-untyped-def]
    """Write `count` lanes from `at` on; 16-bit dtypes round by 16 random bits each, from `noise_at` on."""
    _store_rounded(vectors.values, vectors.is_half, at, value, count, noise, noise_at)


@inlined
def prefetch_row(vectors, at, count):  # type: ignore[no-untyped-def]
    """Prefetch the first eight cache lines of `count` numbers from `at` on."""
    if is_narrow(vectors.values):
        prefetch(vectors.values, at)
        prefetch(vectors.values, at + count - 1)
        if count > 32:
            prefetch(vectors.values, at + 32)
        if count > 64:
            prefetch(vectors.values, at + 64)
            prefetch(vectors.values, at + min(96, count - 1))
        if count > 128:
            prefetch(vectors.values, at + 128)
            prefetch(vectors.values, at + min(160, count - 1))
            prefetch(vectors.values, at + min(192, count - 1))
    else:
        prefetch_span(vectors.values, at, count)
