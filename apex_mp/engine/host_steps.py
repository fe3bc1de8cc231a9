"""Steps on the CPU of parameters on a GPU whose masters and moments are in host memory.

Gradients and weights are copied to the host, the CPU steps, and new weights are copied back, a
bucket of parameters at a time; the copies of one bucket overlap the step of another. Large
parameters are cut to pieces. Masters and moments never travel, so they are not page-locked.

From top to bottom: what a step is asked for, a parameter in it, a piece of one, where pieces lie on
the host, a bucket of pieces, and the step of all buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from apex_mp import _C
from apex_mp.core import forks, readback, transfers
from apex_mp.core.tensors import Lists, match_strides
from apex_mp.engine.host_grads import HostGrads
from apex_mp.grads.found_inf import FoundInf, clip_divisor
from apex_mp.grads.grad_slots import Grads
from apex_mp.grads.in_host_memory import is_mark
from apex_mp.masters.codes import BLOCK, is_exponents
from apex_mp.masters.store import MASTER, master_dtype

Norms: TypeAlias = list[float | Tensor | None]
Moves: TypeAlias = list[tuple[Tensor, Tensor]]

# Elements of a bucket, and how many buckets are under way: one that comes, one that is stepped, one
# that goes.
BUCKET_ELEMENTS = 1 << 22  # A multiple of BLOCK, so that pieces begin at one.
SLOTS = 3
# With so many threads a bucket takes as long with more elements.
_MANY_THREADS, _MORE = 8, 4
# Elements of a tensor to which it travels with others, in one copy: a copy costs the host as much
# time as the bus takes for so many.
SMALL = 1 << 16


@dataclasses.dataclass(frozen=True)
class Request:
    """What a step was asked for; see `_C.StepPlan.read`."""

    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]
    masters: dict[Any, Any]
    make_state: Callable[[int, int], dict[str, Any]]
    grads: Lists | None
    grads_of: Lists | None
    copies: Lists | None
    scale: float | Tensor
    unscale: Sequence[torch.dtype]

    def plain_numbers(self) -> tuple[int, ...]:
        """Return the numbers of parameters whose gradient is not scaled by the loss scale."""
        if self.grads is not None or self.grads_of is None:
            return ()
        sources = itertools.chain.from_iterable(self.grads_of)
        return (*(number for number, source in enumerate(sources) if source is None),)

    def source(self, group: int, index: int) -> Tensor | None:
        """Return the gradient that a parameter is stepped with, as it is there."""
        if self.grads is not None:
            return self.grads[group][index]
        given = None if self.grads_of is None else self.grads_of[group][index]
        param: Tensor = self.param_groups[group]["params"][index] if given is None else given
        return param.grad

    def state_of(self, param: Tensor) -> dict[str, Any] | None:
        """Return the state of a parameter, with its master; None: it has none."""
        state, master = self.state.get(param), self.masters.get(param)
        return state if state is None or master is None else {**state, MASTER: master}


class Layout(NamedTuple):
    """What the host memory for a parameter depends on; `number` is its number in the optimizer."""

    number: int
    place: tuple[int, int]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad_dtype: torch.dtype
    grad_on_host: bool
    scaled: bool
    copy_dtype: torch.dtype | None
    part: int | None  # elements of a piece; None: the parameter is not cut


class Item:
    """A parameter in a step, whose tensors are cut to pieces; `groups` have no tensors on a GPU."""

    def __init__(
        self, layout: Layout, request: Request, grad: Tensor, groups: list[dict[str, Any]]
    ) -> None:
        self._layout, self._request, self._group = layout, request, groups[layout.place[0]]
        self._param: Tensor = request.param_groups[layout.place[0]]["params"][layout.place[1]]
        self.params, self.grads = self._cut(self._param), self._cut(grad)
        copy = None if request.copies is None else request.copies[layout.place[0]][layout.place[1]]
        self.copies = [] if layout.copy_dtype is None or copy is None else self._cut(copy)
        state = request.state_of(self._param)
        self.states: Sequence[dict[str, Any]] | None = None
        if state is not None:
            is_stale = MASTER in state and not master_dtype(self._param, self._group)
            if is_stale or not self._can_use(state):
                self.make_states()
            else:
                self.states = self._cut_state(state)

    def _cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return a tensor's elements in memory order, some at a time, or the tensor itself."""
        if self._layout.part is None:
            return (tensor,)
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        parts: Sequence[Tensor] = torch.split(flat, self._layout.part)
        return parts

    def make_states(self) -> Sequence[dict[str, Any]]:
        """Complete the state and the master; return their parts."""
        self._request.make_state(*self._layout.place)
        state = self._request.state_of(self._param)
        assert state is not None
        self.states = self._cut_state(state)
        return self.states

    def _cut_state(self, state: dict[str, Any]) -> Sequence[dict[str, Any]]:
        if self._layout.part is None:
            return (state,)
        count = len(self.params)
        parts: list[dict[str, Any]] = [{} for _ in range(count)]
        for name, value in state.items():
            if not isinstance(value, Tensor):
                values: Sequence[Any] = [value] * count
            elif value.shape == self._param.shape:
                values = self._cut(value)
            elif is_exponents(name):
                values = torch.split(value, self._layout.part // BLOCK)
            elif value.numel() > 1:
                values = [value.new_empty(0)] * count  # The plan says that it does not fit.
            else:
                # A count of steps: that of the parameter changes with its last part.
                values = [*value.detach().expand(count - 1, *value.shape).clone(), value]
            for part, each in zip(parts, values, strict=True):
                part[name] = each
        return parts

    def _can_use(self, state: dict[str, Any]) -> bool:
        """Return whether a state is in host memory, and can be cut as the parameter is."""
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        # One without numbers is left to the plan, which says so.
        is_here = all(tensor.is_cpu or tensor.is_meta for tensor in tensors)
        alike = [tensor for tensor in tensors if tensor.shape == self._param.shape]
        lie_alike = all(tensor.stride() == self._param.stride() for tensor in alike)
        return is_here and (lie_alike or self._layout.part is None)


class Piece(NamedTuple):
    """A parameter, or a part of a large one, by the number of its item and of the part."""

    item: int
    part: int
    size: int
    layout: Layout

    def on_host(self, memory: Tensor) -> Tensor:
        """Return a flat tensor in the shape of these elements."""
        is_whole = self.layout.part is None
        return memory.as_strided(self.layout.shape, self.layout.stride) if is_whole else memory


class Slot:
    """Memory that several buckets use in turn; it grows to the largest."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._on_gpus: dict[torch.device, Tensor] = {}
        self.departure: Any = None  # an event: the weights that lie here have left

    def take(self, size: int) -> Tensor:
        """Return page-locked bytes."""
        if self._memory is None or self._memory.numel() < size:
            self.wait()
            # torch's allocator takes a power of two anyway.
            self._memory = transfers.pinned(1 << max(size - 1, 0).bit_length())
        return self._memory[:size]

    def take_on_gpu(self, device: torch.device, size: int) -> Tensor:
        """Return bytes on a GPU."""
        if device not in self._on_gpus or self._on_gpus[device].numel() < size:
            self.wait()
            self._on_gpus[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._on_gpus[device][:size]

    def wait(self) -> None:
        """Wait until the weights that were here last have left."""
        if self.departure is not None:
            self.departure.synchronize()
            self.departure = None


class Memory:
    """Tensors of one kind in host memory, one for each piece of a bucket; small ones come first.

    Of a piece whose dtype is None there is none. Sizes are in bytes.
    """

    def __init__(self, pieces: list[Piece], dtypes: Sequence[torch.dtype | None]) -> None:
        self._pieces, self._dtypes = pieces, dtypes
        numbers = [number for number, dtype in enumerate(dtypes) if dtype is not None]
        small = [number for number in numbers if pieces[number].size <= SMALL]
        self._small = {*small} if len(small) > 1 else set()
        self._order = sorted(numbers, key=lambda number: number not in self._small)
        ends = [*itertools.accumulate(map(self._bytes, self._order), initial=0)]
        self._begins = dict(zip(self._order, ends, strict=False))
        self.size, self.small_size = ends[-1], ends[len(self._small)]

    def _bytes(self, number: int) -> int:
        dtype = self._dtypes[number]
        assert dtype is not None
        return transfers.aligned(self._pieces[number].size * dtype.itemsize)

    def lay(self, memory: Tensor, on_gpu: Tensor) -> None:
        """Lay the tensors in memory of `size` on the host, and of `small_size` on the GPU."""
        self.here = [self._view(memory, number) for number in range(len(self._pieces))]
        self._block, self._on_gpu = memory[: self.small_size], on_gpu
        self._there = {number: self._view(on_gpu, number) for number in self._small}

    def _view(self, memory: Tensor, number: int) -> Any:
        piece, dtype = self._pieces[number], self._dtypes[number]
        if dtype is None:
            return None
        begin = self._begins[number]
        return piece.on_host(memory[begin : begin + piece.size * dtype.itemsize].view(dtype))

    def moves(self, tensors: Sequence[Sequence[Tensor]]) -> tuple[Moves, Moves]:
        """Return pairs of a tensor here and one of an item, between which numbers travel.

        The second list has pairs on the GPU, which small tensors go through.
        """
        through, moves = [], []
        for number in self._order:
            tensor = tensors[self._pieces[number].item][self._pieces[number].part]
            if number in self._small:
                through.append((self._there[number], tensor))
            else:
                moves.append((self.here[number], tensor))
        return [*moves, (self._block, self._on_gpu)] if through else moves, through


class Bucket:
    """Pieces on one device that go through a step together, and their host memory.

    It `is_done` when the step was taken and the weights are on their way.
    """

    def __init__(
        self,
        plan: _C.StepPlan,
        pieces: list[Piece],
        groups: int,
        slot: Slot,
        bus: transfers.Transfers,
    ) -> None:
        self.plan, self.bus = plan, bus
        self._slot, self._pieces, self._groups = slot, pieces, groups
        layouts = [piece.layout for piece in pieces]
        # A gradient that is here already needs no other memory.
        grads = Memory(pieces, [None if one.grad_on_host else one.grad_dtype for one in layouts])
        weights = Memory(pieces, [layout.dtype for layout in layouts])
        copies = Memory(pieces, [layout.copy_dtype for layout in layouts])
        every = [grads, weights, copies]
        memory = torch.split(slot.take(sum(e.size for e in every)), [e.size for e in every])
        sizes = [each.small_size for each in every]
        on_gpu = torch.split(slot.take_on_gpu(layouts[0].device, sum(sizes)), sizes)
        for each, here, there in zip(every, memory, on_gpu, strict=True):
            each.lay(here, there)
        self._grads, self._weights, self._copies = every
        # As the plan reads them, by groups.
        self._pieces_of = self._by_group(pieces)
        self._params_of = self._by_group(weights.here)
        self._copies_of = self._by_group(copies.here) if copies.size else None
        by_group = itertools.chain.from_iterable(self._pieces_of)
        self._origins = [(*e.layout.place, e.layout.number) for e in by_group]
        is_complete = all(grad is not None for grad in grads.here)
        self._holders_of = self._holders(grads.here) if is_complete else None
        self.clear()

    def _by_group(self, values: Sequence[Any]) -> list[list[Any]]:
        lists: list[list[Any]] = [[] for _ in range(self._groups)]
        for piece, value in zip(self._pieces, values, strict=True):
            lists[piece.layout.place[0]].append(value)
        return lists

    def _holders(self, grads: Sequence[Tensor]) -> list[list[Any]]:
        """Return tensors whose `.grad` is a scaled gradient; one that is not is the weight's."""
        holders: list[Tensor | None] = []
        for piece, grad, weight in zip(self._pieces, grads, self._weights.here, strict=True):
            holder = grad.detach() if piece.layout.scaled else weight
            holder.grad = grad
            holders.append(holder if piece.layout.scaled else None)
        return self._by_group(holders)

    def clear(self) -> None:
        """Drop what was read."""
        self.plan.clear()
        self._items: list[Item] = []
        self._arrival: Any = None
        self.is_done = False

    def read(self, items: list[Item], groups: list[dict[str, Any]], scale: float) -> None:
        """Make the plan read the pieces; their values are copied later, by `start`."""
        self.clear()  # A Ctrl-C may have kept the last step from it.
        self._items = items
        state: dict[Tensor, Any] = {}
        masters: dict[Tensor, Any] = {}

        def put(piece: Piece, weight: Tensor, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
            own = state[weight] = states[piece.part]
            if MASTER in own:
                masters[weight] = own[MASTER]
            return own

        def make(group: int, index: int) -> dict[str, Any]:
            piece: Piece = self._pieces_of[group][index]
            return put(piece, self._params_of[group][index], items[piece.item].make_states())

        for piece, weight in zip(self._pieces, self._weights.here, strict=True):
            states = items[piece.item].states
            if states is not None:
                put(piece, weight, states)
        holders = self._holders_of
        if holders is None:
            grads = zip(self._pieces, self._grads.here, strict=True)
            holders = self._holders(
                [items[p.item].grads[p.part] if grad is None else grad for p, grad in grads]
            )
        params_of = zip(groups, self._params_of, strict=True)
        self.plan.read(
            [{**group, "params": here} for group, here in params_of],
            state,
            masters,
            make,
            grads=None,
            grads_of=holders,
            copies=self._copies_of,
            scale=scale,
            origins=self._origins,
        )

    def start(self) -> None:
        """Ask for gradients and weights."""
        if self._arrival is None and not self.is_done:
            self._slot.wait()
            grads, through = self._grads.moves([item.grads for item in self._items])
            weights, more = self._weights.moves([item.params for item in self._items])
            self._arrival = self.bus.to_host(grads + weights, through + more)

    def finish(self, norms: Norms, clip_to: float | None, clip_norm: Any) -> None:
        """Take the step, once the gradients are there, and send the weights back."""
        if self.is_done:
            return
        if not self.plan.has_run:  # It has if a Ctrl-C came between the step and the copies.
            self._arrival.synchronize()
            self.plan.run(
                norms=norms,
                found_inf=None,
                check=False,
                clip_by_global_norm=False,
                clip_to=clip_to,
                clip_norm=clip_norm,
                loss_scale=None,
                wait=False,
            )
        moves, through = self._weights.moves([item.params for item in self._items])
        copies, more = self._copies.moves([item.copies for item in self._items])
        self._slot.departure = self.bus.to_device(_turned(moves + copies), _turned(through + more))
        self.is_done = True


def _turned(pairs: Moves) -> Moves:
    return [(there, here) for here, there in pairs]


class HostSteps:
    """Takes the steps; from step to step it keeps plans, page-locked memory and streams.

    The GPU checks and measures gradients where they are, and nothing is copied for a step that is
    skipped. The host waits for that, and steps; the GPU waits for its weights.

    Args:
        who: The optimizer's name, for messages.
        new_plan: Makes a plan for parameters on the CPU.
        steps_parts: Whether parts of tensors can be stepped, so that large ones are cut.
        host_grads: Has gradients that have left the GPU already; None: none have.
    """

    def __init__(
        self,
        who: str,
        new_plan: Callable[[], _C.StepPlan],
        steps_parts: bool,
        host_grads: HostGrads | None,
    ) -> None:
        self._who, self._new_plan = who, new_plan
        self._steps_parts, self._host_grads = steps_parts, host_grads
        self._slots = [Slot() for _ in range(SLOTS)]
        self._buses: dict[torch.device, transfers.Transfers] = {}
        # Elements of a bucket, groups and parameters for which `_buckets` were made.
        self._made_for: tuple[int, int, list[Layout]] = (0, 0, [])
        self._buckets: list[Bucket] = []
        self._read: list[Bucket] = []
        self._on_host: dict[int, Tensor] = {}
        self._to_unscale: list[Tensor] = []
        self._scale = 1.0
        self._failure: str | None = None
        forks.leak_in_children(self)

    @property
    def has_begun(self) -> bool:
        """Whether the step that was read last was taken, or a part of it."""
        return any(bucket.plan.has_run for bucket in self._read)

    def take_gradients(self, request: Request) -> dict[int, Tensor]:
        """Return the gradients that are in host memory already, by the parameter's number."""
        self._on_host = {}
        if self._host_grads is None or request.grads is not None:
            return self._on_host
        self._host_grads.finish()
        for number, (group, index, param) in enumerate(_params(request)):
            given = None if request.grads_of is None else request.grads_of[group][index]
            grad = self._host_grads.of((group, index), param if given is None else given)
            if grad is not None:
                self._on_host[number] = match_strides(grad, param)
        return self._on_host

    def refuse_devices(self, request: Request, grads: Grads) -> None:
        """Raise a RuntimeError if a parameter with a gradient is not on a GPU, or that captures."""
        rows, known = grads.rows(), set[torch.device]()
        for number, (group, index, param) in enumerate(_params(request)):
            if number not in rows or param.device in known:
                continue
            known.add(param.device)
            if not transfers.is_offloadable(param.device):
                raise RuntimeError(
                    f"{self._who}: params[{group}][{index}] is on {param.device}, and offload is "
                    "set; it must be on a GPU. Move the model back, or make an optimizer without "
                    "offload"
                )
            if readback.is_capturing_on(param.device):
                raise RuntimeError(
                    f"{self._who}: {param.device} is capturing a CUDA graph, and with offload the "
                    "CPU takes the step, which a graph cannot hold; capture forward and backward "
                    "alone (offload must be True for that)"
                )

    def read(self, request: Request, grads: Grads) -> None:
        """Read and check a step before anything is changed; missing states are made."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        self._read = []
        (self._scale,) = _on_host([request.scale])
        groups = [
            {name: each.cpu() if isinstance(each, Tensor) else each for name, each in group.items()}
            for group in request.param_groups
        ]
        pairs = [pair for e in grads.plain.values() for pair in zip(e.rows, e.grads, strict=True)]
        grad_of = dict(sorted(pairs, key=lambda pair: pair[0]))
        layouts = self._layouts(request, grad_of, groups)
        made_for = self._elements, len(groups), layouts
        if made_for != self._made_for:
            self._buckets = self._made(layouts, len(groups))
            self._made_for = made_for
        rows = zip(layouts, grad_of.values(), strict=True)
        items = [Item(layout, request, grad, groups) for layout, grad in rows]
        for bucket in self._buckets:
            bucket.read(items, groups, self._scale)
            self._read.append(bucket)
        found: dict[int, Tensor] = {}
        for layout in layouts if request.unscale else ():
            source = request.source(*layout.place)
            if not layout.scaled or source is None or is_mark(source):
                continue
            if source.dtype in request.unscale:
                found[source.data_ptr()] = source  # Each once.
        self._to_unscale = [*found.values()]

    def _layouts(
        self, request: Request, grad_of: dict[int, Tensor], groups: list[dict[str, Any]]
    ) -> list[Layout]:
        layouts, plain = [], {*request.plain_numbers()}
        for number, (group, index, param) in enumerate(_params(request)):
            grad = grad_of.get(number)
            if grad is None:
                continue
            copy = None if request.copies is None else request.copies[group][index]
            # Random bits depend on the number of the element in its parameter.
            can_cut = self._steps_parts and not groups[group].get("stochastic_rounding")
            layouts.append(
                Layout(
                    number,
                    (group, index),
                    param.shape,
                    param.stride(),
                    param.dtype,
                    param.device,
                    grad.dtype,
                    number in self._on_host,
                    number not in plain,
                    None if copy is None or copy is param else copy.dtype,
                    self._elements if can_cut and param.numel() > self._elements else None,
                )
            )
        return layouts

    @property
    def _elements(self) -> int:
        """Elements of a bucket."""
        return BUCKET_ELEMENTS * (_MORE if torch.get_num_threads() >= _MANY_THREADS else 1)

    def _made(self, layouts: list[Layout], groups: int) -> list[Bucket]:
        buckets = []
        for number, pieces in enumerate(self._filled(layouts)):
            device = pieces[0].layout.device
            if device not in self._buses:
                self._buses[device] = transfers.Transfers(device)
            slot, bus = self._slots[number % SLOTS], self._buses[device]
            buckets.append(Bucket(self._new_plan(), pieces, groups, slot, bus))
        return buckets

    def _filled(self, layouts: list[Layout]) -> Iterator[list[Piece]]:
        """Yield the pieces of each bucket, on one device."""
        bucket: list[Piece] = []
        left = self._elements
        for item, layout in enumerate(layouts):
            size = layout.shape.numel()
            step = layout.part or max(size, 1)
            for part, begin in enumerate(range(0, max(size, 1), step)):
                piece = Piece(item, part, min(step, size - begin), layout)
                is_there = bucket and bucket[0].layout.device == layout.device
                if bucket and (piece.size > left or not is_there):
                    yield bucket
                    bucket, left = [], self._elements
                bucket.append(piece)
                left -= piece.size
        if bucket:
            yield bucket

    def step(
        self, norms: Norms, skip: Tensor | None, clip_to: float | None, clip_norm: Tensor | None
    ) -> bool:
        """Take the step that was read, and return False; or True if `skip` is set.

        The arguments are those of `_C.StepPlan.run`; the host waits for their numbers.
        """
        found_inf, norm, *numbers = _on_host([skip, clip_norm, *norms])
        if found_inf:
            return True
        try:
            try:
                self._go_through(numbers, clip_to, norm)
            except KeyboardInterrupt:
                self._go_through(numbers, clip_to, norm)  # The rest: a step is taken whole.
                raise
        except BaseException as error:
            done = sum(bucket.is_done for bucket in self._read)
            if self.has_begun and done < len(self._read):
                self._failure = (
                    f"{self._who}: the step before this one ended with {type(error).__name__} "
                    f"after {done} of {len(self._read)} buckets of parameters; the weights of the "
                    "others are as before it. Load a checkpoint into the model and a new optimizer"
                )
            raise
        if self._to_unscale:
            divisor = self._scale
            if clip_to is not None and clip_norm is not None:
                # As `clipped_scale` of csrc/math/step_scalars.h rounds it.
                excess = clip_divisor(clip_norm.cpu(), clip_to).float()
                divisor = float(excess * torch.tensor(divisor).float()) if excess > 1 else divisor
            FoundInf().unscale_others(self._to_unscale, 1.0 / divisor)
        return False

    def _go_through(self, norms: Norms, clip_to: float | None, clip_norm: Any) -> None:
        """Take the step in each bucket where it is not taken yet."""
        buses = {bucket.bus for bucket in self._read}
        for bus in buses:
            bus.wait_for_gpu()
        try:
            for number, bucket in enumerate(self._read):
                for ahead in self._read[number : number + SLOTS - 1]:
                    ahead.start()
                bucket.finish(norms, clip_to, clip_norm)
        finally:  # Else a late copy could overwrite a checkpoint that is loaded after an error.
            for bus in buses:
                bus.make_gpu_wait()

    def clear(self) -> None:
        """Drop what was read."""
        self._on_host, self._to_unscale = {}, []
        for bucket in self._buckets:
            bucket.clear()


def _params(request: Request) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the group, the index and the parameter, of all parameters."""
    for number, group in enumerate(request.param_groups):
        for index, param in enumerate(group["params"]):
            yield number, index, param


def _on_host(numbers: Sequence[float | Tensor | None]) -> list[Any]:
    """Return numbers as floats; the host waits for each device once."""
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    values: dict[int, float] = {}
    for device in {tensor.device for tensor in tensors}:
        here = [tensor for tensor in tensors if tensor.device == device]
        together = torch.stack([tensor.detach().reshape(()).double() for tensor in here])
        values.update(zip(map(id, here), together.tolist(), strict=True))
    return [values[id(n)] if isinstance(n, Tensor) else n for n in numbers]
