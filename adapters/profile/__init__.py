"""Where the time goes: what each node takes, in all processes, as a table, a trace and a picture.

measure.py    the clocks around the nodes
book.py       what they have measured, merged over processes
report.py     the table, and what to do about the slowest node
adapter.py    Profile
"""

from .adapter import Profile
from .book import NodeProfile

__all__ = ["NodeProfile", "Profile"]
