"""Executors: run a task in other processes, on this machine or on many, for walks, the museum and sweeps of
`kvsm whatif`.

`executor` has the interface, and the code that is common to all executors. `forked` uses forked processes of
this machine, `ray_cluster` the workers of a Ray cluster.
"""
