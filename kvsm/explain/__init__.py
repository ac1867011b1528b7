"""Explain a log: its tables, life stories, causes, reports, timelines and predictions.

One pass over a log (`tables/extract.py`) makes the rows that `tables/row_kinds.py` declares. An index beside
the log stores them (`tables/table_index.py`). Reports, causes, timelines and queries read the tables and do
not fold the log again.
"""
