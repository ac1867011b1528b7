"""The methods that vLLM calls, and what kvsm does in each call: a table of docs/vllm.md.

`interface` compares it with the installed vLLM. If a new vLLM adds, removes or changes a method, a test fails
until the row here fits. `vllm_options` has the options.

`connector_interfaces` has the methods that vLLM calls on `KvsmConnector`, `interface_records` the records
that it passes to `KvsmConnector` and `RecordingSpec`. `rows` defines the rows.
"""

from __future__ import annotations

from kvsm.vllm.interface_table.connector_interfaces import INTERFACES
from kvsm.vllm.interface_table.interface_records import RECORDS
from kvsm.vllm.interface_table.rows import PROPERTY, Interface, Method, Record

__all__ = ["INTERFACES", "PROPERTY", "RECORDS", "Interface", "Method", "Record"]
