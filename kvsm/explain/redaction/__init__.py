"""Copies of logs that name no client, no key and no place: what `kvsm export --redact` writes.

`names.py` makes the new names, `rules.py` says what happens to each field of each record, and
`redacted_log.py` writes the copy.
"""
