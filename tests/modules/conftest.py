"""The fixtures of tests of operations."""

from tests.ops.conftest import device, either_amax, fresh

__all__ = ["device", "either_amax", "fresh"]
