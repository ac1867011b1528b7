"""The automata of managers for vLLM's OffloadingConnector, learned from their answers alone.

aalpy learns the Mealy automata of two managers with a pool of one block: vLLM's, and one that knows
nothing but the rows of kvsm's block machine. `README.md` says in what they differ. It is written by

    PYTHONPATH=specs python -m automata.write

with vLLM 0.33 and aalpy beside kvsm. A test compares it.
"""
