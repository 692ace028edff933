"""Compiled graphs as tests read them: which operators of `lowp::` are in them, and how many graphs there are."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._guards import CompileContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowp.kernels.sources import Plain
from lowp.values import decode


def lowp_ops(graph: torch.fx.GraphModule) -> list[str]:
    """Names of the nodes that are operators of `lowp::`, those that functionalization wraps included."""
    names = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        target = node.target
        if "auto_functionalized" in str(target):
            target = node.args[0]
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "lowp":
            names.append(target._opname)
    return names


def other_ops(graph: torch.fx.GraphModule) -> list[str]:
    """Names of the nodes that are other operators."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in names if not name.startswith("lowp.") and "getitem" not in name]


class Graphs:
    """A backend that keeps the graphs: of forwards with a backward, of backwards, and of forwards alone."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self.inference: list[torch.fx.GraphModule] = []
        self._compiled: set[str] = set()
        self._backend = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            inference_compiler=self._keep(self.inference),
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self._compiled.add(str(CompileContext.current_compile_id()))
        return self._backend(graph, inputs)

    @property
    def frames(self) -> int:
        """How many graphs were compiled; one that Dynamo traced twice, to start again, counts once."""
        return len(self._compiled)

    @staticmethod
    def _keep(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return compiler

    def compile(self, function: Any, **kwargs: Any) -> Any:
        """`torch.compile` without graph breaks."""
        return torch.compile(function, backend=self, fullgraph=True, **kwargs)


class CountOps(TorchDispatchMode):
    """Counts the operators of `lowp::` that run in eager mode, and those of them that work their values out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lowp":
            self.counts[func._opname] += 1
            self.computed[func._opname] += isinstance(args[0], list) and not isinstance(decode(args[1]), Plain)
        return func(*args, **(kwargs or {}))


class PeakMemory(TorchDispatchMode):
    """The most bytes that operators' results take up at one time; what is inside one operator isn't seen."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: set[int] = set()

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Don't count what is there already."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self._hold(result.untyped_storage())
        self.peak = max(self.peak, self.held)
        return results

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.held += size
            weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


@contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """Everything that autograd saves inside."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
