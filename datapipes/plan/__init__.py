"""What the next steps will take of each source, worked out before they run."""

from .overlaps import Overlap, overlap
from .rehearse import Plan, plan

__all__ = ["Overlap", "Plan", "overlap", "plan"]
