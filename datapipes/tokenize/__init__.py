"""Text to token files."""

__all__: list[str] = []
