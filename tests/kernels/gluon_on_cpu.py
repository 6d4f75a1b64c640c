"""Emulates the parts of Gluon that sparse_attention uses: programs run one after another on the CPU, with torch.

The emulation checks values and the order of asynchronous operations. The target of a copy holds NaN until the kernel
waits for the copy. A matrix product is computed when the kernel waits for the product, and fails if an operand has
changed since the product began. Layouts and threads are not emulated.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MODULES = ("triton", "triton.experimental", "triton.experimental.gluon", "triton.experimental.gluon.language")


@dataclass(frozen=True)
class Pointer:
    dtype: torch.dtype


class Value:
    """A tensor or scalar in registers. The data of a pointer are byte offsets into `memory`, a flat tensor of bytes."""

    def __init__(self, data: Any, memory: Tensor | None = None, pointee: torch.dtype | None = None) -> None:
        self.data = data if isinstance(data, Tensor) else torch.tensor(data)
        self.memory, self.pointee = memory, pointee
        self.type = SimpleNamespace(layout=None)

    @property
    def shape(self) -> Sequence[int]:
        return self.data.shape

    def _with(self, other: Any, function: Callable[[Any, Any], Tensor], swap: bool = False) -> "Value":
        operand = other.data if isinstance(other, Value) else other
        if self.pointee is not None:
            return Value(self.data + operand * self.pointee.itemsize, self.memory, self.pointee)
        if isinstance(other, Value) and other.pointee is not None:
            return other._with(self, function)
        return Value(function(operand, self.data) if swap else function(self.data, operand))

    def __add__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a + b)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a - b)

    def __rsub__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a - b, swap=True)

    def __mul__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a * b)

    __rmul__ = __mul__

    def __rtruediv__(self, other: Any) -> "Value":
        return Value(other / self.data)

    def __floordiv__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a // b)

    def __mod__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a % b)

    def __and__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a & b)

    def __or__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a | b)

    def __rshift__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a >> b)

    def __lt__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a < b)

    def __ge__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a >= b)

    def __gt__(self, other: Any) -> "Value":
        return self._with(other, lambda a, b: a > b)

    def __index__(self) -> int:
        return int(self.data)

    def to(self, kind: torch.dtype | Pointer, bitcast: bool = False) -> "Value":
        if isinstance(kind, Pointer):
            return Value(self.data, self.memory, kind.dtype)
        return Value(self.data.view(kind) if bitcast else self.data.to(kind))


class Shared:
    """A view of shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> Sequence[int]:
        return self.data.shape

    def index(self, i: int | Value) -> "Shared":
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def store(self, value: Value) -> None:
        assert value.data.shape == self.data.shape and value.data.dtype == self.data.dtype
        self.data.copy_(value.data)

    def load(self, layout: object) -> Value:
        return Value(self.data.clone())


@dataclass
class Product:
    """A matrix product in flight."""

    a: Shared
    b: Shared
    sums: "Value | Product"
    use_acc: bool
    begun_with: tuple[Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.begun_with = (self.a.data.clone(), self.b.data.clone())

    def result(self) -> Tensor:
        for operand, before in zip((self.a, self.b), self.begun_with, strict=True):
            same = torch.equal(operand.data.contiguous().view(torch.int16), before.contiguous().view(torch.int16))
            assert same, "an operand changed while the product was in flight"
        product = self.a.data.float() @ self.b.data.float()
        if not self.use_acc:
            return product
        return product + (self.sums.result() if isinstance(self.sums, Product) else self.sums.data)


class Machine:
    """The state of the emulation: the running program's position in the grid, and the copies in flight."""

    def __init__(self) -> None:
        self.program, self.grid = (0, 0), (1, 1)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def copy(self, target: Shared, source: Value, mask: Value) -> None:
        data = load(source, mask).data
        assert data.shape == target.data.shape and data.dtype == target.data.dtype
        target.data.fill_(float("nan"))
        self.copies.append((target.data, data))

    def wait_group(self, num_outstanding: int) -> None:
        assert num_outstanding == 0
        for target, data in self.copies:
            target.copy_(data)
        self.copies.clear()


def load(pointer: Value, mask: Value | None = None, other: float = 0) -> Value:
    assert pointer.memory is not None and pointer.pointee is not None
    itemsize = pointer.pointee.itemsize
    allowed = torch.ones_like(pointer.data, dtype=torch.bool) if mask is None else mask.data.expand_as(pointer.data)
    offsets = pointer.data[allowed]
    assert bool((offsets % itemsize == 0).all()), "a misaligned load"
    result = torch.full(pointer.data.shape, other, dtype=pointer.pointee)
    result[allowed] = pointer.memory.view(pointer.pointee)[offsets // itemsize]
    return Value(result)


def store(pointer: Value, value: Value, mask: Value) -> None:
    assert pointer.memory is not None and pointer.pointee is not None and value.data.dtype == pointer.pointee
    allowed = mask.data.expand_as(pointer.data)
    targets = pointer.data[allowed] // pointer.pointee.itemsize
    pointer.memory.view(pointer.pointee)[targets] = value.data.expand_as(pointer.data)[allowed]


def inline_asm(asm: str, constraints: str, args: Sequence[Value], dtype: object, is_pure: bool, pack: int) -> Any:
    if asm.startswith("cvt.rn.f16x2.f32"):
        half = args[0].data.to(torch.float16).view(torch.int16).to(torch.int32) & 0xFFFF
        return Value(half | (half << 16))
    codes, ratio = args
    ratios = (ratio.data & 0xFFFF).to(torch.int16).view(torch.float16)
    octets = ((codes.data[..., None] >> torch.tensor([0, 8, 16, 24])) & 0xFF).to(torch.uint8)
    values = octets.view(torch.float8_e4m3fn).to(torch.float16) * ratios[..., None]
    return tuple(Value(values[..., n].contiguous()) for n in range(4))


def wait_for(num_outstanding: int, deps: Sequence[Product]) -> Any:
    assert num_outstanding == 0
    results = tuple(Value(product.result()) for product in deps)
    return results[0] if len(results) == 1 else results


def language(machine: Machine) -> ModuleType:
    gl = ModuleType(MODULES[-1])
    identity = {"constexpr": lambda x: x, "convert_layout": lambda x, layout: x, "static_range": range}
    layouts = ("BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "SwizzledSharedLayout")
    types = ("int32", "int64", "float16", "bfloat16", "float32")
    functions = {
        "tensor": Value,
        "shared_memory_descriptor": Shared,
        "pointer_type": Pointer,
        "barrier": lambda: None,
        "load": load,
        "store": store,
        "inline_asm_elementwise": inline_asm,
        "program_id": lambda axis: Value(machine.program[axis]),
        "num_programs": lambda axis: Value(machine.grid[axis]),
        "cdiv": lambda a, b: (a + (b - 1)) // b,
        "allocate_shared_memory": lambda dtype, shape, layout: Shared(torch.full(shape, float("nan"), dtype=dtype)),
        "arange": lambda start, end, layout: Value(torch.arange(start, end, dtype=torch.int32)),
        "zeros": lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
        "full": lambda shape, value, dtype, layout: Value(torch.full(shape, value, dtype=dtype)),
        "where": lambda c, a, b: Value(torch.where(c.data, *(getattr(x, "data", x) for x in (a, b)))),
        "minimum": lambda a, b: Value(torch.minimum(a.data, b.data)),
        "maximum": lambda a, b: Value(
            torch.maximum(a.data, torch.as_tensor(getattr(b, "data", b), dtype=a.data.dtype))
        ),
        "max": lambda x, axis: Value(x.data.amax(axis)),
        "sum": lambda x, axis: Value(x.data.sum(axis)),
        "abs": lambda x: Value(x.data.abs()),
        "exp2": lambda x: Value(torch.exp2(x.data)),
        "log2": lambda x: Value(torch.log2(x.data)),
        "expand_dims": lambda x, axis: Value(x.data.unsqueeze(axis), x.memory, x.pointee),
        "reshape": lambda x, shape: Value(x.data.reshape(shape)),
        "permute": lambda x, order: Value(x.data.permute(order)),
        "split": lambda x: (Value(x.data[..., 0]), Value(x.data[..., 1])),
        "join": lambda a, b: Value(torch.stack((a.data, b.data), -1)),
    }
    names = {name: lambda *arguments: None for name in layouts} | {name: getattr(torch, name) for name in types}
    for name, value in (names | identity | functions).items():
        setattr(gl, name, value)
    return gl


def _jit(function: Any = None, **options: Any) -> Any:
    return function or (lambda decorated: decorated)


def fake_modules(machine: Machine) -> Iterator[ModuleType]:
    gl = language(machine)
    gluon = ModuleType("triton.experimental.gluon")
    gluon.jit = _jit  # type: ignore[attr-defined]
    gluon.constexpr_function = lambda function: function  # type: ignore[attr-defined]
    gluon.language = gl  # type: ignore[attr-defined]
    experimental = ModuleType("triton.experimental")
    experimental.gluon = gluon  # type: ignore[attr-defined]
    ampere, hopper = (ModuleType(f"{gl.__name__}.nvidia.{name}") for name in ("ampere", "hopper"))
    ampere.async_copy = SimpleNamespace(  # type: ignore[attr-defined]
        async_load=machine.copy, commit_group=lambda: None, wait_group=machine.wait_group
    )
    hopper.fence_async_shared = lambda: None  # type: ignore[attr-defined]
    hopper.warpgroup_mma = lambda a, b, sums, use_acc=True, is_async=True: Product(a, b, sums, use_acc)  # type: ignore[attr-defined]
    hopper.warpgroup_mma_wait = wait_for  # type: ignore[attr-defined]
    yield from (ModuleType("triton"), experimental, gluon, gl, ModuleType(f"{gl.__name__}.nvidia"), ampere, hopper)


class Kernel:
    """Launches a kernel with the syntax of Gluon: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None], machine: Machine) -> None:
        self._function, self._machine = function, machine

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*, num_warps: int, enable_fp_fusion: bool, **arguments: Any) -> None:
            self._machine.grid = grid
            for x in range(grid[0]):
                for y in range(grid[1]):
                    self._machine.program = (x, y)
                    self._function(**{name: _to_value(argument) for name, argument in arguments.items()})
                    assert not self._machine.copies, "the program ended while copies were in flight"

        return launch


def _to_value(argument: Any) -> Any:
    """Turns a tensor into a pointer to its first element, and a number into a scalar.

    A bool is a constexpr and is returned as it is.
    """
    if isinstance(argument, bool):
        return argument
    if not isinstance(argument, Tensor):
        return Value(argument)
    itemsize = argument.element_size()
    base = torch.as_strided(argument, (argument.untyped_storage().nbytes() // itemsize,), (1,), 0)
    return Value(argument.storage_offset() * itemsize, base.view(torch.uint8), argument.dtype)


def load_module(path: Path, kernels: Sequence[str], helpers: Sequence[str] = ()) -> ModuleType:
    """Imports the file at `path`, and the modules `helpers` that it imports, with the emulated Gluon.

    The functions named in `kernels` can be launched on the CPU as attributes of the returned module.
    """
    machine = Machine()
    modules = {module.__name__: module for module in fake_modules(machine)}
    before = {name: sys.modules.get(name) for name in (*modules, *helpers)}
    for name in helpers:
        sys.modules.pop(name, None)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_on_cpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules |= modules
    try:
        spec.loader.exec_module(module)
    finally:
        for name, previous in before.items():
            sys.modules.pop(name, None)
            if previous is not None:
                sys.modules[name] = previous
    for name in kernels:
        setattr(module, name, Kernel(getattr(module, name), machine))
    return module
