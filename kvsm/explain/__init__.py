"""What a log tells about a whole run: its tables, and what follows from them.

One pass over a log (`extract.py`) makes the rows that `rows.py` declares. An index beside the log keeps them
(`index.py`). Reports, causes, timelines and queries read the tables and never fold the log again.
"""
