"""What a run says, it says once: warnings and summaries come from rank 0. Errors come from every rank."""

import os
import warnings

__all__ = ["is_rank_zero", "say", "warn"]


def is_rank_zero() -> bool:
    """Whether this process is rank 0 of torch.distributed; before that is set up, of torchrun's RANK; else alone."""
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0").strip() in ("", "0")


def warn(message: str, category: type[Warning], stacklevel: int = 1) -> None:
    """warnings.warn on rank 0, as if called where this is called (stacklevel 1), or further out."""
    if is_rank_zero():
        warnings.warn(message, category, stacklevel=stacklevel + 1)


def say(summary: object) -> None:
    """Prints a summary, on rank 0."""
    if is_rank_zero():
        print(summary, flush=True)
