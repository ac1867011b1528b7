"""The protocol of the offload core as Murphi and as TLA+, and what Rumur and TLC say of it. `README.md` says
how to run it."""
