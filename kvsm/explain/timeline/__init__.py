"""A window of a log as a picture: one offline HTML page, or a trace for Perfetto.

`stream.py` folds the events of the window: the text of each, what it did to the blocks (`moves.py`), and the
pool after it. `columns.py` takes the rows of the window from an opened log, and `lanes.py` gives each request
and each copy a lane. Both outputs are made from the two: `page.py` puts them into the HTML page whose parts
are in `page/`, and `perfetto.py` writes them as a Perfetto trace.
"""
