"""What a log would have been with another host pool: `kvsm whatif`.

`demand` reads from a log which blocks were looked up and offered, and when. `simulate` gives the same lookups
and offers to a host pool of another size, policy or store threshold, by the code of `kvsm.core.policies`.
`optimum` bounds what any policy could have served.
"""
