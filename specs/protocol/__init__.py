"""The offload protocol (`kvsm.check.protocol`) as Murphi and TLA+, and what Rumur and TLC say of it.

`README.md` says how to run it. `texts.py` writes the texts; `opinions.py` compares the tools' answers.
"""
