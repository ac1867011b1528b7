"""Contracts that CrossHair proves about kvsm's code. `README.md` says which, and how to run them."""
