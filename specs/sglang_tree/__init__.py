"""Test SGLang's prefix tree with `kvsm.testing.PrefixTreeMachine`, without a GPU.

`machines.py` has a machine for each write policy and each core of the tree. docs/findings.md says how to run
them, and what they have found.
"""

from sglang_tree.without_gpu import prepare

prepare()  # before `machines` imports SGLang
