"""What vLLM calls, and what kvsm does with each call: a table of docs/vllm.md.

`interface` compares it with the installed vLLM. A method that a new vLLM adds, removes or changes fails a
test until it has its row here. `vllm_options` has the options.

`connector_interfaces` has what vLLM calls on `KvsmConnector`, `records` what it passes to it and to
`RecordingSpec`. `rows` says what a row means.
"""

from __future__ import annotations

from kvsm.vllm.interface_table.connector_interfaces import INTERFACES
from kvsm.vllm.interface_table.interface_records import RECORDS
from kvsm.vllm.interface_table.rows import PROPERTY, Interface, Method, Record

__all__ = ["INTERFACES", "PROPERTY", "RECORDS", "Interface", "Method", "Record"]
