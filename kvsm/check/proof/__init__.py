"""The proof for any size: the protocol's claims by induction over its actions, by SMT solvers."""
