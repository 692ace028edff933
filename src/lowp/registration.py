"""The one helper that defines, implements and fakes a registered operator of the namespace `lowp::`.

    register(schema, ref=..., launch=..., allocate=...) -> call

`ref` is plain torch and is the CPU kernel; `launch` is the CUDA kernel; `allocate` gives outputs of the right shape,
dtype, strides and device, and is the fake kernel as well as what `launch` allocates with. The first tensor among the
arguments decides the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowp.errors import require
from lowp.torch_compat import dispatch_is_interposed

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
    schema: str, *, ref: Callable[..., Any], launch: Callable[..., Any], allocate: Callable[..., Any]
) -> Callable[..., Any]:
    """Register one operator and return the function that calls it.

    Args:
        schema: `name(Tensor x, ...) -> ...`; no argument of a mutating operator may be called `mode`, `_mutable_op`
            or `_all_bases` (functionalization passes arguments under these names).
        ref: kernel in plain torch, for CPU.
        launch: kernel for CUDA.
        allocate: fake kernel.

    Raises:
        ValueError: an operator of this name is registered, or an argument's name is reserved.

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
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    kernels = {"cpu": _without_autocast(ref), "cuda": _on_device(_without_autocast(launch))}
    LIBRARY.impl(name, kernels["cpu"], "CPU")
    LIBRARY.impl(name, kernels["cuda"], "CUDA")
    torch.library.register_fake(f"lowp::{name}", allocate, lib=LIBRARY)
    overload = getattr(torch.ops.lowp, name).default
    REGISTRY[name] = Registered(overload, ref, launch, allocate)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or dispatch_is_interposed():
            return overload(*args)
        for arg in args:
            if isinstance(arg, torch.Tensor) and type(arg) not in _PLAIN:
                return overload(*args)
        return kernels.get(_device(args).type, overload)(*args)

    call.__name__ = call.__qualname__ = name
    return call


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _device(args: tuple[Any, ...]) -> torch.device:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
    return torch.device("cpu")


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Run `kernel` with torch.autocast off: its inner torch calls would change dtype otherwise."""

    def call(*args: Any) -> Any:
        device = _device(args).type
        if not torch.is_autocast_enabled(device):
            return kernel(*args)
        with torch.autocast(device, enabled=False):
            return kernel(*args)

    return call


def _on_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Run `kernel` under its first argument's device: Triton launches on the current one."""

    def call(*args: Any) -> Any:
        index = _device(args).index
        if index == torch.cuda.current_device():
            return kernel(*args)
        with torch.cuda.device(index):
            return kernel(*args)

    return call
