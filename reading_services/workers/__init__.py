"""Worker processes: how one is started, what travels to it and back, and what becomes of one that dies.

pickled.py is a graph on its way to a worker, raised.py an exception on its way back.
"""
