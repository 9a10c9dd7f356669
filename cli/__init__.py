"""The command `tokenpipe`: one module a subcommand, in the order of a run's life.

    tokenize → inspect → plan → contents, when, certify

A subcommand's module has a docstring (its help), `add_arguments(parser)` and `run(arguments) -> int` (the
exit status). `main.py` finds it by its name, and imports no other.
"""

__all__: list[str] = []
