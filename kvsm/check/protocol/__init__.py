"""The offload protocol: declared once, as data, and explored as such."""
