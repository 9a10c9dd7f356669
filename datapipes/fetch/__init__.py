"""From numbers to rows of tokens: which files they lie in, and how those are held.

routes.py         numbers down to the nodes that make items, batches of them up
gather.py         all rows of a batch, from whatever files, by one call into compiled code
held_files.py     which files are mapped, copied or open just now
descriptors.py    a file that is read, and not mapped (filemap.py)
checks.py         what of a file is compared with its manifest before it is given
pages.py          when pages are read ahead, and let go of
remote_pieces.py, fetch_ahead.py    what lies in remote files; when that is fetched
"""
