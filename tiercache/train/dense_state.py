"""Dense state: modules, optimizers and random states, committed with the rows as tensors and plain values."""

from __future__ import annotations

import hashlib
import io
import pickle
import random
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tiercache.errors import StateError
from tiercache.train.joint_optimizer import state_without, with_anchors
from tiercache.train.table_module import TableModule, anchor_ids
from tiercache.values.torch_internals import refused_by

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from tiercache.dist.communicator import AnyCommunicator
    from tiercache.rows.backends.base import Backend

_PLAIN = {int, float, complex, str, bytes, bool, type(None)}
"""Exactly these types: a numpy number may be a subclass of float, but cannot be read back safely."""
_TENSOR_BYTES = 2048  # more than the bytes that torch adds per parameter in a file
_DATA_PARALLEL = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_RESTORING = "restoring the last commit"

RandomStates = dict[str, Any]  # the states of random generators, as a commit stores them


class DenseState:
    """Tracked objects and the random generators of torch (the CPU's and the device's), numpy and random.

    With several ranks, rank 0 stores the objects that are the same on all (``keep_once``). Stored with ``torch.save``
    and read with ``weights_only=True``, so loading executes nothing pickled.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.objects: dict[str, Any] = {}  # those registered, by name, with a state_dict
        self.same: frozenset[str] = frozenset()  # the names of objects that rank 0 stores for all ranks
        self._shared = self.same  # those that rank 0 stores for this rank
        self._buffered: frozenset[str] = frozenset()  # those of ``same`` of whose buffers each rank stores its own
        self._restored: set[str] = set()

    def register(self, objects: dict[str, Any]) -> None:
        """Add objects by name. Raises StateError at once for state that cannot be stored, naming the value."""
        anchors = anchor_ids([*self.objects.values(), *objects.values()])
        for name, value in objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise StateError(
                    f"register({name}=...) got a {type(value).__name__}, which has no state_dict or load_state_dict: "
                    "pass a module, an optimizer, a scheduler, or an object with these two methods"
                )
            state = _state_of(value, anchors)
            _refuse_unstorable(state, name)
            try:
                _load(_save(_map_tensors(state, lambda tensor: tensor)))
            except Exception as error:
                raise StateError(
                    f"the state of register({name}=...) cannot be stored and read back safely ({_line(error)}): keep "
                    "only tensors, numbers, strings, lists, tuples and dictionaries in its state_dict"
                ) from error
        self._restored -= {name for name, value in objects.items() if self.objects.get(name) is not value}
        self.objects.update(objects)

    def note_restored(self) -> None:
        """Mark all objects as restored from, or captured by, the rows' commit."""
        self._restored |= self.objects.keys()

    @property
    def is_restored(self) -> bool:
        """True if nothing was registered since ``note_restored``."""
        return self.objects.keys() <= self._restored

    @property
    def unrestored(self) -> list[str]:
        """The names of modules that were registered and not restored since."""
        modules = [name for name, value in self.objects.items() if isinstance(value, torch.nn.Module)]
        return [name for name in modules if name not in self._restored]

    def random_states(self) -> RandomStates:
        """Return the states of the global generators of torch, numpy and random, and of the device's generator."""
        version, numbers, gauss = random.getstate()
        kind, words, place, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - users' global generator
        found: RandomStates = {
            "torch": torch.get_rng_state().clone(),
            "python": (version, torch.from_numpy(np.array(numbers)), gauss),  # a tuple is pickled number by number
            "numpy": (kind, torch.from_numpy(np.asarray(words, dtype=np.int64)), place, has_gauss, cached),
        }
        on_device = self._backend.random_state()
        return found if on_device is None else found | {"device": on_device}

    def capture(self, random_states: RandomStates | None = None) -> Callable[[], bytes]:
        """Clone the current state; the returned function serializes the clone, on any thread.

        random_states: instead of the current ones. Raises StateError for state that cannot be stored, since it may have
        changed after ``register``.
        """
        anchors = anchor_ids(self.objects.values())
        objects = {name: _state_of(one, anchors) for name, one in self.objects.items() if name not in self._shared}
        objects |= {name: _parts_of(self.objects[name], anchors)[1] for name in self._shared & self._buffered}
        for name, value in objects.items():
            _refuse_unstorable(value, name)
        state = {
            "objects": _map_tensors(objects, lambda tensor: tensor.detach().clone()),
            "shared": sorted(self._shared),
            **(random_states or self.random_states()),
        }
        events = _record_events(state["objects"])

        def save() -> bytes:
            with ExitStack() as streams:
                for device, event in events.items():
                    streams.enter_context(_stream_after(device, event))
                return _save(state)

        return save

    def most_bytes(self) -> int:
        """Return about the most bytes that a commit stores, with two tensors per parameter for unstepped optimizers."""
        total = len(self.capture()())
        for name, value in self.objects.items():
            if isinstance(value, torch.optim.Optimizer) and not value.state and name not in self._shared:
                parameters = (p for group in value.param_groups for p in group["params"])
                total += sum(2 * p.numel() * p.element_size() + _TENSOR_BYTES for p in parameters)
            elif name in self._shared - self._buffered:
                buffers = tensors_of(_parts_of(value, ())[1])
                total += sum(one.numel() * one.element_size() + _TENSOR_BYTES for one in buffers)
        return total

    def keep_once(self, ranks: AnyCommunicator) -> None:
        """Have rank 0 store each module, optimizer, scheduler and scaler that is now the same on all ranks. Collective.

        They stay the same in a data-parallel training, except for buffers, which each rank stores if they differ. Those
        with sharded parameters may be the same only now: each rank stores these, other objects and its generators.
        """
        if ranks.size == 1:
            return
        with ranks.raise_on_all("comparing what was registered"):
            anchors = anchor_ids(self.objects.values())
            digests = {
                name: [*map(_digest, _parts_of(value, anchors))]
                for name, value in self.objects.items()
                if isinstance(value, _DATA_PARALLEL) and not _is_sharded(value)
            }
        first, *others = ranks.all_gather_object(digests)
        same = {name for name in first if all(name in one and one[name][0] == first[name][0] for one in others)}
        self.same = frozenset(same)
        self._buffered = frozenset(name for name in same if any(one[name] != first[name] for one in others))
        self._shared = self.same if ranks.rank else frozenset()

    def keep_apart(self, ranks: AnyCommunicator) -> None:
        """Let each rank store its own state of objects that no longer match, and warn of them.

        Compares some elements of each parameter and of its optimizer's state. Of buffers, each rank stores its own
        without a warning. Collective.
        """
        if not (names := sorted(self.same)):
            return
        with ranks.raise_on_all("comparing what was registered"):
            anchors = anchor_ids(self.objects.values())
            parts = [_parts_of(self.objects[name], anchors) for name in names]
            digests = [_sample_of(part) for pair in zip(*parts, strict=True) for part in pair]
        found = ranks.all_reduce_min([*digests, *(-one for one in digests)], "comparing what was registered")
        differ = [low != -high for low, high in zip(found, found[len(digests) :], strict=False)]
        self._buffered |= {name for name, is_other in zip(names, differ[len(names) :], strict=True) if is_other}
        others = [name for name, is_other in zip(names, differ, strict=False) if is_other]
        if not others:
            return
        self.same -= {*others}
        self._shared -= {*others}
        if ranks.rank == 0:
            warnings.warn(
                f"{_names({*others})} had the same state on all ranks when the loop began, and no longer have it, so "
                "each rank commits its own: if the ranks train one model, wrap it in DistributedDataParallel, or "
                "average its gradients before each step",
                stacklevel=4,
            )

    @property
    def sharded(self) -> list[str]:
        """The names of objects of which each rank has a part."""
        return [name for name, value in self.objects.items() if _is_sharded(value)]

    def restore(self, data: bytes, ranks: AnyCommunicator) -> None:
        """Restore all from ``data``, b"" if no rank stored any. Raises StateError if the names differ. Collective."""
        with ranks.raise_on_all(_RESTORING):
            state = _read(data) if data else {"objects": {}, "shared": []}
        if any(ranks.all_gather_object(bool(state["shared"]))):
            first = _read(_of_rank_0(data, ranks))["objects"]
            own = state["objects"]  # of these, only buffers
            own |= {name: first[name] | own.get(name, {}) for name in state["shared"] if name in first}
        with ranks.raise_on_all(_RESTORING):
            if data:
                self._load_state(state)

    def _load_state(self, state: dict[str, Any]) -> None:
        stored, tracked = set(state["objects"]), set(self.objects)
        if stored != tracked:
            raise StateError(
                f"the last commit holds the state of {_names(stored)}, but register() was given {_names(tracked)}: "
                "register the same objects under the same names"
            )
        anchors = anchor_ids(self.objects.values())
        for name, value in self.objects.items():
            kept = state["objects"][name]
            TableModule.is_restoring = True
            try:
                if isinstance(value, torch.optim.Optimizer):
                    value.load_state_dict(with_anchors(value, anchors, _sharded_like(value, anchors, kept)))
                else:
                    value.load_state_dict(kept if not isinstance(value, nn.Module) else _sharded(kept, value))
            except (RuntimeError, ValueError, KeyError) as error:
                raise StateError(
                    f"the state of {name!r} in the last commit does not match the {type(value).__name__} "
                    f"passed to register() ({_line(error)}): register the same object as before, or start a new store"
                ) from error
            finally:
                TableModule.is_restoring = False
        torch.set_rng_state(state["torch"])
        if "device" in state:
            self._backend.set_random_state(state["device"])
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers.tolist()), gauss))
        kind, words, place, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, words.numpy().astype(np.uint32), place, has_gauss, cached))  # noqa: NPY002 - as above


def load_module(module: nn.Module, data: bytes, commit: str) -> None:
    """Load a module's state from a commit, under any name. Raises StateError if the commit has none, or several."""
    shapes = _shapes(module.state_dict())
    if not shapes:
        return
    objects = _read(data)["objects"] if data else {}
    fitting = [name for name, one in objects.items() if isinstance(one, dict) and _shapes(one) == shapes]
    chosen = ["model"] if "model" in fitting else fitting
    if len(chosen) != 1:
        found = f"{_names({*chosen})}, which all match" if chosen else f"{_names({*objects})}, which do not match"
        raise StateError(
            f"{commit} has the state of {found} a {type(module).__name__} with these parameters: pass the model that "
            "was registered, or resume from this commit with TierCache(at=...) and take the model from there"
        )
    TableModule.is_restoring = True
    try:
        module.load_state_dict(objects[chosen[0]])
    finally:
        TableModule.is_restoring = False


def _shapes(state: dict[str, Any]) -> dict[str, object]:
    return {key: tuple(one.shape) if isinstance(one, torch.Tensor) else type(one) for key, one in state.items()}


def _state_of(value: Any, anchors: Collection[int]) -> dict[str, Any]:
    """Return the state of an object without its anchors; of a DTensor, as in FSDP, this rank's part."""
    found = state_without(value, anchors) if isinstance(value, torch.optim.Optimizer) else value.state_dict()
    if not any(hasattr(tensor, "to_local") for tensor in tensors_of(found)):
        return found
    local: dict[str, Any] = _map_tensors(found, lambda one: one.to_local() if hasattr(one, "to_local") else one)
    return local


def _sharded(kept: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    current = module.state_dict()
    return {name: _part_of(current.get(name), value) for name, value in kept.items()}


def _sharded_like(optimizer: torch.optim.Optimizer, anchors: Collection[int], kept: dict[str, Any]) -> dict[str, Any]:
    """Return a state with DTensors for per-element optimizer state of parameters that are DTensors."""
    parameters = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in anchors]
    if not any(hasattr(one, "to_local") for one in parameters):
        return kept
    numbers = [number for group in kept["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    state = {
        number: {name: _part_of(by_number.get(number), value) for name, value in one.items()}
        for number, one in kept["state"].items()
    }
    return kept | {"state": state}


def _part_of(whole: Any, part: Any) -> Any:
    """Return this rank's part as a DTensor if ``whole`` is a DTensor of that part shape; else the part."""
    if not (hasattr(whole, "to_local") and isinstance(part, torch.Tensor)) or part.shape != whole.to_local().shape:
        return part
    local = part.to(whole.to_local().device)
    return type(whole.data).from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _of_rank_0(data: bytes, ranks: AnyCommunicator) -> bytes:
    size = ranks.all_gather_object(len(data))[0]
    sent = torch.from_numpy(np.frombuffer(b"" if ranks.rank else data, np.uint8).copy()).to(ranks.device)
    return ranks.all_gather(sent, [size] + [0] * (ranks.size - 1)).cpu().numpy().tobytes()


def _is_sharded(value: Any) -> bool:
    """Return True for a module with sharded parameters or buffers, or an optimizer of such parameters."""
    tensors = [one for group in getattr(value, "param_groups", ()) for one in group["params"]]
    if isinstance(value, nn.Module):
        tensors += [*value.parameters(), *value.buffers()]
    return any(hasattr(one, "to_local") for one in tensors)


def _parts_of(value: Any, anchors: Collection[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of an object without the buffers of a module, and these."""
    state = _state_of(value, anchors)
    if not isinstance(value, nn.Module):
        return state, {}
    names = {name for name, _ in value.named_parameters(remove_duplicate=False)}
    return {n: one for n, one in state.items() if n in names}, {n: one for n, one in state.items() if n not in names}


def _sample_of(state: dict[str, Any]) -> int:
    """Return a digest of plain values and of up to 256 elements of each tensor of a state."""
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for one in tensors_of(state):
        if one.layout is torch.strided and not one.is_quantized:
            some = one.detach().flatten()[:: max(1, -(-one.numel() // 256))].resolve_conj().resolve_neg()
            samples.setdefault(one.device, []).append(some.contiguous().view(torch.uint8))
    plain = _map_tensors(state, lambda one: f"{one.dtype} {tuple(one.shape)}")
    return int(_digest([plain, [torch.cat(parts) for parts in samples.values()]])[:15], 16)


def _digest(value: Any) -> str:
    """Return a digest of a state: equal for equal values, on any device."""
    found = hashlib.blake2b(digest_size=16)

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            tensor = part.detach().cpu().resolve_conj().resolve_neg()
            found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor.layout is torch.strided and not tensor.is_quantized:
                found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
            else:
                found.update(_save(tensor))
        elif isinstance(part, dict):
            add(len(part))
            for key, item in part.items():
                add(key)
                add(item)
        elif isinstance(part, (list, tuple)):
            add(len(part))
            for item in part:
                add(item)
        else:
            found.update(f"{type(part).__name__} {'' if isinstance(part, torch.device) else part!r}".encode())

    add(value)
    return found.hexdigest()


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".:")


def _save(state: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _read(data: bytes) -> Any:
    """Return the state of a commit. Raises StateError if it is invalid, and executes nothing in it."""
    try:
        return _load(data)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
    ) as error:
        raise StateError(
            f"the dense state of the last commit is not only tensors and plain values ({refused_by(error)}), so it was "
            "not loaded and nothing in it was executed: TierCache writes no such state; restore the store from a "
            "source you trust"
        ) from error


def _record_events(state: object) -> dict[int, torch.cuda.Event]:
    """Record an event on each GPU that has tensors of a state; on others it would create a context of 100s of MB."""
    devices = sorted({tensor.device.index for tensor in tensors_of(state) if tensor.device.type == "cuda"})
    return {device: torch.cuda.current_stream(device).record_event() for device in devices}


@contextmanager
def _stream_after(device: int, event: torch.cuda.Event) -> Iterator[None]:
    """Use a new stream that waits for an event; on the training stream, copies would wait for its steps."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor of a state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_of(item)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a state in which each tensor is replaced by ``change(tensor)``, and numbers of NumPy by Python's."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(_map_tensors(item, change) for item in value)
    return value


def _refuse_unstorable(value: Any, path: str, *, is_key: bool = False) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_unstorable(key, f"{path}[{key!r}]", is_key=True)
            _refuse_unstorable(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple, set)):
        for place, item in enumerate(value):
            _refuse_unstorable(item, f"{path}[{place}]")
    elif isinstance(value, torch.Tensor) and value.is_meta:
        raise StateError(
            f'the state at {path} is on "meta" and has no values: call model.to_empty(device=...) and initialize the '
            "model (init_weights() of transformers does) before you make its optimizer and give it to a cache"
        )
    elif isinstance(value, np.generic) and not is_key and type(value.item()) in _PLAIN:
        pass  # stored as Python's
    elif not isinstance(value, (torch.Tensor, torch.dtype, torch.device)) and type(value) not in _PLAIN:
        raise StateError(
            f"the state at {path} is a {type(value).__name__}, which a commit cannot store: keep only tensors, "
            "numbers, strings, lists, tuples and dictionaries in a tracked state_dict"
        )
