"""Contracts that CrossHair proves about the code of kvsm. `README.md` says what, and how to run it."""
