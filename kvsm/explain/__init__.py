"""What a log tells.

One pass over a log (`tables/extract.py`) makes the rows that `tables/row_kinds.py` declares. An index beside
the log keeps them (`tables/table_index.py`). Reports, causes, timelines and queries read the tables and never
fold the log again.
"""
