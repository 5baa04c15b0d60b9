"""Sixteen float32 at a time: a vector type for kernels, so that loops need not hope for the vectorizer.

`Lanes` values live in registers. Offsets count elements of the flattened C-contiguous array and are not checked.
`count` says how many lanes take part (a constant 16 after inlining costs nothing); the others read as zero and are not
written. LLVM lowers everything to whatever the CPU has. No operation is fused with another.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, models, register_model, type_callable

from tiercache.kernels.cpu.compile import inlined, intrinsic

WIDTH = 16

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_MASK = ir.VectorType(ir.IntType(1), WIDTH)


class Lanes(types.Type):
    """Numba's type of sixteen float32."""

    def __init__(self) -> None:
        super().__init__(name="Lanes16xfloat32")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _VECTOR)  # type: ignore[no-untyped-call]


def _operator(function: Callable[..., Any], instruction: str) -> None:
    @type_callable(function)
    def _typed(_context: Any) -> Any:
        def typer(left: Any, right: Any) -> Any:
            return lanes if isinstance(left, Lanes) and isinstance(right, Lanes) else None

        return typer

    @lower_builtin(function, Lanes, Lanes)  # type: ignore[no-untyped-call]
    def _lowered(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return getattr(builder, instruction)(*arguments)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_function, _instruction)


def element_address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Return the address of an element: for code that emits instructions."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def _kind(array_type: Any) -> tuple[Any, str, int]:
    """Return the vector type of an array's elements, what LLVM calls it, and its alignment."""
    if array_type.dtype == types.uint16:
        return ir.VectorType(ir.IntType(16), WIDTH), "v16i16", 2
    return _VECTOR, "v16f32", 4


def _vector_address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    address = element_address(context, builder, array_type, array, offset)
    return builder.bitcast(address, _kind(array_type)[0].as_pointer())


def _repeat(builder: Any, value: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INT(0))
    zeros = ir.Constant(ir.VectorType(_INT, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _mask(builder: Any, count: Any) -> Any:
    wide = ir.VectorType(_INT, WIDTH)
    limit = _repeat(builder, builder.trunc(count, _INT), wide)
    return builder.icmp_signed("<", ir.Constant(wide, list(range(WIDTH))), limit)


def _all_lanes(builder: Any, count: Any) -> Any:
    """Return True if no mask is needed: CPUs without mask registers are slow at them, most at stores."""
    return builder.icmp_signed(">=", count, ir.Constant(count.type, WIDTH))


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Emit a call of an LLVM intrinsic or a C function; result: its type."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)  # type: ignore[no-untyped-call]
    return builder.call(function, arguments)


def masked_load(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, count: Any) -> Any:
    """Emit a load of `count` elements of float32 or uint16; the others are zero."""
    kind, name, align = _kind(array_type)
    address = _vector_address(context, builder, array_type, array, offset)
    with builder.if_else(_all_lanes(builder, count), likely=True) as (all_of_them, some_of_them):
        with all_of_them:
            plain, plain_block = builder.load(address, align=align), builder.block
        with some_of_them:
            inputs = [address, _INT(align), _mask(builder, count), ir.Constant(kind, [kind.element(0)] * WIDTH)]
            masked, masked_block = call(builder, f"llvm.masked.load.{name}.p0", kind, inputs), builder.block
    value = builder.phi(kind)
    value.add_incoming(plain, plain_block)
    value.add_incoming(masked, masked_block)
    return value


def masked_store(context: Any, builder: Any, array_type: Any, array: Any, offset: Any, value: Any, count: Any) -> None:
    """Emit a store of the first `count` lanes to an array of float32 or uint16."""
    _, name, align = _kind(array_type)
    address = _vector_address(context, builder, array_type, array, offset)
    with builder.if_else(_all_lanes(builder, count), likely=True) as (all_of_them, some_of_them):
        with all_of_them:
            builder.store(value, address, align=align)
        with some_of_them:
            inputs = [value, address, _INT(align), _mask(builder, count)]
            call(builder, f"llvm.masked.store.{name}.p0", ir.VoidType(), inputs)


@intrinsic
def load(_typing: Any, array: Any, offset: Any, count: Any) -> Any:
    """Return `count` elements of a float32 array from `offset` on."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return masked_load(context, builder, array, *arguments)

    return lanes(array, types.intp, types.intp), emit


@intrinsic
def store(_typing: Any, array: Any, offset: Any, value: Any, count: Any) -> Any:
    """Write the first `count` lanes of `value` to a float32 array from `offset` on."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        masked_store(context, builder, array, *arguments)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes, types.intp), emit


@intrinsic
def stream(_typing: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write sixteen lanes past the caches, to an address that is a multiple of 64 bytes; `fence` makes them visible."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = _vector_address(context, builder, array, arguments[0], arguments[1])
        written = builder.store(arguments[2], address, align=4 * WIDTH)
        written.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes), emit


@intrinsic
def splat(_typing: Any, value: Any) -> Any:
    """Return sixteen times one float32."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _repeat(builder, arguments[0], _VECTOR)

    return lanes(types.float32), emit


@intrinsic
def sqrt(_typing: Any, value: Any) -> Any:
    """Return the correctly rounded square roots."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return call(builder, "llvm.sqrt.v16f32", _VECTOR, [arguments[0]])

    return lanes(lanes), emit


@intrinsic
def total(_typing: Any, value: Any) -> Any:
    """Return the sum of all lanes, by halves: lane i + lane i+8, then +4, +2, +1."""

    def emit(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        value, half = arguments[0], WIDTH // 2
        while half:
            order = ir.Constant(ir.VectorType(_INT, WIDTH), [(lane + half) % WIDTH for lane in range(WIDTH)])
            value = builder.fadd(value, builder.shuffle_vector(value, ir.Constant(_VECTOR, ir.Undefined), order))
            half //= 2
        return builder.extract_element(value, _INT(0))

    return types.float32(lanes), emit


@intrinsic
def fence(_typing: Any) -> Any:
    """Make everything this thread wrote, streamed writes too, visible to the others."""

    def emit(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def prefetch(_typing: Any, array: Any, offset: Any) -> Any:
    """Prefetch the cache line of the element at `offset` of the flattened array; never faults."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = element_address(context, builder, array, arguments[0], arguments[1])
        # for reading, into the second-level cache: more of them can be under way than of those into the first
        inputs = [builder.bitcast(address, cgutils.voidptr_t), _INT(0), _INT(2), _INT(1)]
        call(builder, "llvm.prefetch.p0", ir.VoidType(), inputs)
        return context.get_dummy_value()

    return types.void(array, types.intp), emit


@inlined
def prefetch_span(array, offset, count):  # type: ignore[no-untyped-def]
    """Prefetch the first eight cache lines of `count` elements; the CPU's own prefetcher follows a longer row.

    Straight-line on purpose: LLVM unrolls a loop of prefetches without end.
    """
    prefetch(array, offset)
    prefetch(array, offset + count - 1)
    if count > 16:
        prefetch(array, offset + 16)
    if count > 32:
        prefetch(array, offset + 32)
        prefetch(array, offset + min(48, count - 1))
    if count > 64:
        prefetch(array, offset + 64)
        prefetch(array, offset + min(80, count - 1))
        prefetch(array, offset + min(96, count - 1))
        prefetch(array, offset + min(112, count - 1))


@intrinsic
def atomic_next(_typing: Any, counter: Any) -> Any:
    """Return the first element of an int64 array and add one to it, as one step for all threads."""

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address = element_address(context, builder, counter, arguments[0], ir.IntType(64)(0))
        return builder.atomic_rmw("add", address, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), emit
