"""Hand-over of blocks between two engines of one machine: one has computed a prompt, the other decodes.

    prefill engine                          decode engine
    its blocks stay pinned under a lease    a client sends it the lease's name
    service: a thread, a unix socket   <->  claims: a thread, a connection for each claim
    its host pool, a file              -->  imports: each rank copies its share into its own pool
    the lease ends, the pins go        <--  "I have read them": were they held all along?

Neither engine waits for the other in a step, and neither trusts the other to be alive. The prefill engine
gives the memory up when the time of a lease is up, even while somebody reads it. The decode engine believes
what it copied only if the lease was still its own after the copy.

- `leases`: the table of leases: who may read, and until when;
- `peer_messages`: what the two engines say to each other, and the names by which they meet;
- `service`: the socket of the prefill engine;
- `claiming`: the decode engine's side of it;
- `imports`: the copies of one rank.

These know no ledger. What an engine decides by them is in `outgoing` and `incoming`, which `kvsm.vllm`
connects.
"""
