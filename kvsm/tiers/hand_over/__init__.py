"""Hand-over of blocks between two engines of one machine: one has computed a prompt, the other decodes.

    prefill engine                          decode engine
    its blocks stay pinned under a lease    a client sends it the lease's name
    service: a thread, a unix socket   <->  claims: a thread, a connection for each claim
    its host pool, a file              -->  imports: each rank copies its share into its own pool
    the lease ends, the pins end       <--  "I have copied them": were they pinned until now?

Neither engine waits for the other in a step, and neither relies on the other being alive. The prefill engine
releases the blocks when a lease expires, even if the decode engine is reading them. The decode engine uses
copied blocks only if its lease was still valid after the copy.

- `leases`: the table of leases: which engine may read, and until when;
- `peer_messages`: the messages between the two engines, and the names of their socket and pools;
- `service`: the socket of the prefill engine;
- `claiming`: the decode engine's connections to it;
- `imports`: the copies of one rank.

These do not use the ledger. `outgoing` and `incoming` make the decisions of the two engines from them;
`kvsm.vllm` connects these two.
"""
