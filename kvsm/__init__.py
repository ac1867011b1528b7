"""kvsm: an event-sourced state machine for KV-cache offload, with formal checking."""
