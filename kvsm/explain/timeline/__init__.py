"""Draw a window of a log: as one offline HTML page, or as a trace for Perfetto.

`stream.py` folds the events of the window: each event's text, its effect on the blocks (`moves.py`), and the
pool after it. `columns.py` reads the rows of the window from an opened log, and `lanes.py` gives each request
and each copy a lane. `page.py` puts both, the events and the rows, into the HTML page whose parts are in
`page/`. `perfetto.py` writes them as a Perfetto trace.
"""
