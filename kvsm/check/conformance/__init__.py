"""Whether the ledger does what the declared protocol says: both run on the events of a log, side by side."""
