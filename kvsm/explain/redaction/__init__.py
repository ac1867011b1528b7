"""Copy a log without the names of clients, keys and places, for `kvsm export --redact`.

`names.py` makes the new names, `rules.py` has a rule for each field of each record, `redacted_log.py` writes
the copy, and `copy_mark.py` marks it.
"""
