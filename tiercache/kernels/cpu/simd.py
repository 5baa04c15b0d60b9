"""Sixteen float32 at a time: a vector type for kernels, so that loops do not depend on the vectorizer.

`Lanes` values live in registers. Offsets count elements of the flattened C-contiguous array and are not checked.
`count` is the number of lanes that take part (a constant 16 after inlining costs nothing); the others read as zero and
are not written. LLVM lowers everything to the instructions of the CPU. No operations are fused.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from tiercache.kernels.cpu.compile import inlined

WIDTH = 16

_FLOAT = ir.FloatType()
_INT, _LONG = ir.IntType(32), ir.IntType(64)
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


class Elements(NamedTuple):
    """An array in a function that emits instructions."""

    context: Any
    type: Any
    value: Any

    def address(self, builder: Any, offset: Any) -> Any:
        """Return the address of an element."""
        data = self.context.make_array(self.type)(self.context, builder, self.value).data
        return builder.gep(data, [offset])

    @property
    def vector(self) -> tuple[Any, str, int]:
        """The vector type of the elements, its name in LLVM, and the alignment."""
        if self.type.dtype == types.uint16:
            return ir.VectorType(ir.IntType(16), WIDTH), "v16i16", 2
        return _VECTOR, "v16f32", 4

    def vector_address(self, builder: Any, offset: Any) -> Any:
        """Return the address of sixteen elements."""
        return builder.bitcast(self.address(builder, offset), self.vector[0].as_pointer())


def emitted(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that emits the LLVM instructions of a call: it gets the builder, then the arguments.

    result, parameters: numba's types; `Elements` for an array of any type.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def typed(_context: Any, *given: Any) -> Any:
            known = [one if kind is Elements else kind for kind, one in zip(parameters, given, strict=True)]

            def lower(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                pairs = zip(parameters, known, arguments, strict=True)
                value = emit(builder, *(Elements(context, t, a) if kind is Elements else a for kind, t, a in pairs))
                return context.get_dummy_value() if value is None else value

            return result(*known), lower

        return intrinsic(typed)

    return decorate


def _repeat(builder: Any, value: Any, kind: Any) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _INT(0))
    zeros = ir.Constant(ir.VectorType(_INT, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)


def _mask(builder: Any, count: Any) -> Any:
    wide = ir.VectorType(_INT, WIDTH)
    limit = _repeat(builder, builder.trunc(count, _INT), wide)
    return builder.icmp_signed("<", ir.Constant(wide, list(range(WIDTH))), limit)


def _all_lanes(builder: Any, count: Any) -> Any:
    """Return True if no mask is needed: CPUs without mask registers are slow with masks, most for stores."""
    return builder.icmp_signed(">=", count, ir.Constant(count.type, WIDTH))


def call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """Emit a call of an LLVM intrinsic or a C function; result: its type."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)  # type: ignore[no-untyped-call]
    return builder.call(function, arguments)


def masked_load(builder: Any, array: Elements, offset: Any, count: Any) -> Any:
    """Emit a load of `count` elements of float32 or uint16; the others are zero."""
    (kind, name, align), address = array.vector, array.vector_address(builder, offset)
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


def masked_store(builder: Any, array: Elements, offset: Any, value: Any, count: Any) -> None:
    """Emit a store of the first `count` lanes to an array of float32 or uint16."""
    (_, name, align), address = array.vector, array.vector_address(builder, offset)
    with builder.if_else(_all_lanes(builder, count), likely=True) as (all_of_them, some_of_them):
        with all_of_them:
            builder.store(value, address, align=align)
        with some_of_them:
            inputs = [value, address, _INT(align), _mask(builder, count)]
            call(builder, f"llvm.masked.store.{name}.p0", ir.VoidType(), inputs)


@emitted(lanes, Elements, types.intp, types.intp)
def load(builder: Any, array: Elements, offset: Any, count: Any) -> Any:
    """Return `count` elements of a float32 array from `offset` on."""
    return masked_load(builder, array, offset, count)


@emitted(types.void, Elements, types.intp, lanes, types.intp)
def store(builder: Any, array: Elements, offset: Any, value: Any, count: Any) -> None:
    """Write the first `count` lanes of `value` to a float32 array from `offset` on."""
    masked_store(builder, array, offset, value, count)


@emitted(types.void, Elements, types.intp, lanes)
def stream(builder: Any, array: Elements, offset: Any, value: Any) -> None:
    """Write sixteen lanes past the caches, to an address that is a multiple of 64 bytes; `fence` makes them visible."""
    written = builder.store(value, array.vector_address(builder, offset), align=4 * WIDTH)
    written.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))


@emitted(lanes, types.float32)
def splat(builder: Any, value: Any) -> Any:
    """Return sixteen times one float32."""
    return _repeat(builder, value, _VECTOR)


@emitted(lanes, lanes)
def sqrt(builder: Any, value: Any) -> Any:
    """Return the correctly rounded square roots."""
    return call(builder, "llvm.sqrt.v16f32", _VECTOR, [value])


@emitted(types.float32, lanes)
def total(builder: Any, value: Any) -> Any:
    """Return the sum of all lanes, by halves: lane i + lane i+8, then +4, +2, +1."""
    half = WIDTH // 2
    while half:
        order = ir.Constant(ir.VectorType(_INT, WIDTH), [(lane + half) % WIDTH for lane in range(WIDTH)])
        value = builder.fadd(value, builder.shuffle_vector(value, ir.Constant(_VECTOR, ir.Undefined), order))
        half //= 2
    return builder.extract_element(value, _INT(0))


@emitted(types.void)
def fence(builder: Any) -> None:
    """Make everything this thread wrote, streamed writes too, visible to the others."""
    builder.fence("seq_cst")


@emitted(types.void, Elements, types.intp)
def prefetch(builder: Any, array: Elements, offset: Any) -> None:
    """Prefetch the cache line of the element at `offset` of the flattened array; never faults."""
    # for reading, into the second-level cache: more of these can be in flight than into the first
    inputs = [builder.bitcast(array.address(builder, offset), cgutils.voidptr_t), _INT(0), _INT(2), _INT(1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), inputs)


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


@emitted(types.int64, Elements)
def atomic_next(builder: Any, counter: Elements) -> Any:
    """Return the first element of an int64 array and add one to it, as one step for all threads."""
    return builder.atomic_rmw("add", counter.address(builder, _LONG(0)), _LONG(1), "monotonic")
