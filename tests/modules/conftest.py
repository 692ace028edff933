"""The fixtures of tests of operations."""

from tests.ops.conftest import cuda_backward_thread, device, either_amax, fresh

__all__ = ["cuda_backward_thread", "device", "either_amax", "fresh"]
