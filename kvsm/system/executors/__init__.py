"""Work for other processes, here or on many machines: walks, the museum, sweeps of `kvsm whatif`.

`executor` says what every executor promises, and keeps the promises that do not depend on who works.
`processes` works in forked processes of this machine, `ray_cluster` in those of a Ray cluster.
"""
