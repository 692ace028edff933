"""The fixtures of tests of operations."""

from tests.ops.conftest import cuda_backward_thread, device, fresh

__all__ = ["cuda_backward_thread", "device", "fresh"]
