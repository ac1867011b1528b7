"""`python -m kvsm` is `kvsm`."""

from kvsm.cli import main

main(prog_name="kvsm")
