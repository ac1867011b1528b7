"""Predict the hit rate of a log with another host pool: `kvsm whatif`.

`demand` reads from a log which blocks were looked up and offered, and when. `simulate` replays these lookups
and offers on a host pool of another size, policy or store threshold, with the code of `kvsm.core.policies`.
`optimum` computes an upper bound for any policy.
"""
