"""The one helper that defines, implements and fakes a registered operator of the namespace `lowp::`.

    register(schema, ref=..., launch=..., allocate=...) -> call

`ref` is plain torch and is the CPU kernel; `launch` is the CUDA kernel; `allocate` gives outputs of the right shape,
dtype, strides and device, and is the fake kernel as well as what `launch` allocates with. The first tensor among the
arguments decides the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lowp.errors import require
from lowp.torch_compat import constant, current_cuda_device, dispatch_is_interposed

LIBRARY = torch.library.Library("lowp", "DEF")


@dataclass(frozen=True)
class Registered:
    """A registered operator: its overload and the functions behind it."""

    overload: torch._ops.OpOverload
    ref: Callable[..., Any]
    launch: Callable[..., Any]
    allocate: Callable[..., Any]


_RESERVED = re.compile(r"\b(mode|_mutable_op|_all_bases)(?=[,)])")

REGISTRY: dict[str, Registered] = {}
"""Every operator of `lowp::` by name; the conformance suite walks it."""


def register(
    schema: str,
    *,
    ref: Callable[..., Any],
    launch: Callable[..., Any],
    allocate: Callable[..., Any],
    random: bool = False,
) -> Callable[..., Any]:
    """Register one operator and return the function that calls it.

    Args:
        schema: `name(Tensor x, ...) -> ...`; no argument of a mutating operator may be called `mode`, `_mutable_op`
            or `_all_bases` (functionalization passes arguments under these names). A list of tensors comes first.
        ref: kernel in plain torch, for CPU.
        launch: kernel for CUDA.
        allocate: fake kernel.
        random: each call gives another result: compilers neither merge nor repeat calls.

    Raises:
        ValueError: an operator of this name is registered, an argument's name is reserved, or a list of tensors is
            not the first argument.

    Returns:
        A function of the operator's arguments, all positional. It goes through the dispatcher when a graph is being
        traced, when gradients are recorded, or when anything is interposed (dispatch modes, transforms, tensor
        subclasses), and straight to the kernel otherwise.
    """
    name = schema.partition("(")[0]
    require(
        name not in REGISTRY,
        "register",
        "each operator has its own name",
        got=f"lowp::{name} again",
        hint="Rename the operation's class.",
    )
    if "!)" in schema:
        reserved = _RESERVED.findall(schema)
        require(not reserved, f"lowp::{name}", "arguments of a mutating operator need other names", got=reserved)
    rest = schema.partition("->")[0].partition(",")[2]
    require("Tensor[]" not in rest, f"lowp::{name}", "a list of tensors must be the first argument", got=rest)
    tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.nondeterministic_seeded,) if random else ()))
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, _guarded(ref), "CPU")
    LIBRARY.impl(name, _guarded(launch), "CUDA")
    torch.library.register_fake(f"lowp::{name}", allocate, lib=LIBRARY)
    overload = getattr(torch.ops.lowp, name).default
    REGISTRY[name] = Registered(overload, ref, launch, allocate)

    kernels = {"cpu": ref, "cuda": launch}
    takes_floats = re.search(r"\bfloat\b", schema) is not None

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            if takes_floats:  # under `dynamic=True` one may be symbolic: a graph is of one number
                args = tuple([constant(arg) if isinstance(arg, float) else arg for arg in args])
            return overload(*args)
        if torch.is_grad_enabled() or dispatch_is_interposed():
            return overload(*args)
        device = None
        for arg in unpacked(args):
            kind = type(arg)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                device = device or arg.device
            elif isinstance(arg, torch.Tensor):
                return overload(*args)
        if device is None or device.type not in kernels or _needs_guard(device):
            return overload(*args)
        return kernels[device.type](*args)

    call.__name__ = call.__qualname__ = name
    return call


def unpacked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All arguments, those of a list of tensors too."""
    return (*args[0], *args[1:]) if args and isinstance(args[0], (tuple, list)) else args


def _needs_guard(device: torch.device) -> bool:
    """Whether a kernel on this device can't run as things stand: see `_guarded`."""
    if torch.is_autocast_enabled(device.type):
        return True
    return device.type == "cuda" and device.index != current_cuda_device()


def _guarded(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Run `kernel` with torch.autocast off, which would change its inner calls, and under its tensors' device.

    Triton launches on the current device.
    """

    def call(*args: Any) -> Any:
        device = next(arg.device for arg in unpacked(args) if isinstance(arg, torch.Tensor))
        if not _needs_guard(device):
            return kernel(*args)
        with torch.autocast(device.type, enabled=False), _under(device):
            return kernel(*args)

    return call


def _under(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
