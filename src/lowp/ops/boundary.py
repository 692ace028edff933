"""What torch.compile sees: whole operations, or the kernels inside them."""

from __future__ import annotations

from typing import Literal

from lowp.errors import require

Boundary = Literal["operation", "kernel"]

_DEFAULT: Boundary = "operation"
_boundary: Boundary = _DEFAULT


class compile_boundary:  # noqa: N801  called as a function, or used as a context manager
    """Choose what a node of a compiled graph is.

    Called as a statement it sets the default; as a context manager it holds inside.

    Args:
        boundary: "operation": one node for each operation and direction. "kernel": operations are traced inline and
            their kernels are the nodes, so that Inductor sees what is around them. Results are the same bits. On an
            H200 the first is faster in every measured case, since operators are replayed (`lowp.replay`); the second
            takes less memory around single layers, since an operation's caller holds its arguments until it is done.

    Raises:
        ValueError: another name.
    """

    def __init__(self, boundary: Boundary) -> None:
        global _boundary
        require(
            boundary in ("operation", "kernel"),
            "compile_boundary",
            'boundary must be "operation" or "kernel"',
            got=repr(boundary),
        )
        self._outer = _boundary
        _boundary = boundary

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        global _boundary
        _boundary = self._outer


def compile_boundary_is_operation() -> bool:
    """Whether a node of the graph is a whole operation."""
    return _boundary == "operation"
