"""Many environments stepped together: in this process, in subprocesses, or by a batched simulator."""
