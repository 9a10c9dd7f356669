"""Worker processes: how one is started, what travels to it and back, and what becomes of one that dies.

    main process                                        worker
    numbered.py, streamed.py   which item is whose      numbered.py, streamed.py   the items
    turns.py                   how they are dealt       worker.py                  what it is told, and tells
    pool.py                    who lives, who is stuck     losses.py  who was lost, and when that is an error
    process.py                 one process: start, life line, where it is, how it ended
    channel.py                 messages, and slots of shared memory
    packing.py                 an item, taken apart and put together
    pickled.py                 the graph, on its way there; datapipes/raised.py: an exception, on its way back

dispatch.py is the process that runs part of a stream for all workers, preload.py what a fork server imports.
"""
