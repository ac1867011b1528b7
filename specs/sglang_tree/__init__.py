"""SGLang's prefix tree under `kvsm.testing.PrefixTreeMachine`, without a GPU.

`machines.py` has a machine for each write policy and each core of the tree; docs/findings.md says what they
have found, and how they are run.
"""

from sglang_tree.without_gpu import prepare

prepare()  # before `machines` imports SGLang
