"""Contracts about kvsm's code that CrossHair proves. `README.md` lists them and says how to prove them."""
