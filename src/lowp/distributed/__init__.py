"""Process groups, collectives, and parameters that are sharded over them."""

from lowp.distributed.sharding import load_sharded_state, reduce_sequence_parallel_grads, sharded_state

__all__ = ["load_sharded_state", "reduce_sequence_parallel_grads", "sharded_state"]
