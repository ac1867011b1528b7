"""Export the offload protocol (`kvsm.check.protocol`) as Murphi and TLA+, and check it with Rumur and TLC.

`README.md` says how to run it. `texts.py` writes the exports; `opinions.py` compares the tools' answers.
"""
