"""The modules of a transformer: facades that own parameters with familiar names and run pipelines of operations."""

from lowp.modules.linear import Linear

__all__ = ["Linear"]
