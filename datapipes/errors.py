"""Every exception that tokenpipe raises on purpose.

Each is also the built-in that a caller would catch without knowing us:

    TokenpipeError
    ├── ConfigurationError (ValueError)       an argument's value cannot be used
    │   ├── BatchSizeError                    micro-batch, global batch, step boundaries
    │   ├── RecipeError                       a recipe that cannot be read, built or written
    │   ├── TopologyError                     ranks and sizes
    │   └── WeightsError                      weights, temperature, caps of a blend
    ├── ArgumentTypeError (TypeError)         an argument's type cannot be used
    ├── OutOfRangeError (IndexError)          a number beyond `end`, an index beyond `len`
    ├── GraphError (RuntimeError)             a node that is not in the graph, or cannot be cut or adapted there
    ├── NodeTimeoutError (TimeoutError)       a node that did not give an item in its time
    ├── SkipBudgetError (RuntimeError)        more samples that cannot be made than `SkipErrors` allows
    ├── TokenFileError (OSError)              a file that is missing, cut, or not what it says
    │   └── RemoteFileError                   one behind a URL: missing, changed, or not to be had for now
    ├── TokenIdError (ValueError)             a token id that does not fit
    ├── CertificateError (ValueError)         a certificate file that is damaged, or none of ours
    ├── DocumentError (ValueError)            a text that cannot be read as documents: file, line, what is wrong
    ├── DrawingError (RuntimeError)           a picture that cannot be made: graphviz is missing, or failed
    ├── RankError (RuntimeError)              other ranks that did not answer, or are gone
    ├── WorkerError (RuntimeError)            a worker process that did not do its work
    │   ├── WorkerDiedError                   three died while computing the same batch
    │   └── WorkerStalledError                a batch that was not made in time, twice
    ├── StateError (ValueError)               a state that is not one of ours, or is damaged
    │   └── StateMismatchError                a good state, of another order
    ├── JournalError (ValueError)             a change of the run that cannot be recorded
    ├── SourceExhaustedError (RuntimeError)   a capped source is through, and that is an error
    ├── SourceGoneError (RuntimeError)        tokens of a dropped source that is no longer there
    └── LoaderError (RuntimeError)            a loader used out of turn
        ├── IteratorInvalidatedError
        └── LoaderShutdownError

Warnings: `TokenFileWarning` (a file looks wrong), `LoaderWarning` (a call does nothing here, or ranks get wrong data).
"""

__all__ = [
    "ArgumentTypeError",
    "BatchSizeError",
    "CertificateError",
    "ConfigurationError",
    "DocumentError",
    "DrawingError",
    "GraphError",
    "IteratorInvalidatedError",
    "JournalError",
    "LoaderError",
    "LoaderShutdownError",
    "LoaderWarning",
    "NodeTimeoutError",
    "OutOfRangeError",
    "RankError",
    "RecipeError",
    "RemoteFileError",
    "SkipBudgetError",
    "SourceExhaustedError",
    "SourceGoneError",
    "StateError",
    "StateMismatchError",
    "TokenFileError",
    "TokenFileWarning",
    "TokenIdError",
    "TokenpipeError",
    "TopologyError",
    "WeightsError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerStalledError",
]


class TokenpipeError(Exception):
    """The root of all exceptions that tokenpipe raises on purpose."""


class ConfigurationError(TokenpipeError, ValueError):
    """An argument's value cannot be used."""


class BatchSizeError(ConfigurationError):
    """A micro-batch or global batch size that does not divide, or a place inside a step."""


class RecipeError(ConfigurationError):
    """A recipe that cannot be read or built, with the place in it; or a graph that no recipe can hold."""


class TopologyError(ConfigurationError):
    """Ranks and sizes that do not fit each other."""


class WeightsError(ConfigurationError):
    """Weights, a temperature, repeats or caps that a blend cannot use."""


class ArgumentTypeError(TokenpipeError, TypeError):
    """An argument's type cannot be used."""


class OutOfRangeError(TokenpipeError, IndexError):
    """A number at or beyond `end`, or an index at or beyond `len`."""


class GraphError(TokenpipeError, RuntimeError):
    """A node that is not in the graph, or that cannot be cut or adapted where it stands; the message names it."""


class NodeTimeoutError(TokenpipeError, TimeoutError):
    """A node that did not give an item in the time that `Timeout` set; the message names it and shows where it was."""


class SkipBudgetError(TokenpipeError, RuntimeError):
    """More samples or items cannot be made than `SkipErrors` may do without; the message has the last one."""


class TokenFileError(TokenpipeError, OSError):
    """A token file that is missing, empty, cut, or not what its header or its caller says."""


class RemoteFileError(TokenFileError):
    """A file behind a URL that is missing, may not be read, has changed, or did not come in all the tries there are.

    `errno` is ENOENT, EACCES, ESTALE (changed since it was looked up), ENOSPC (no room in the shard cache), else EIO;
    `filename` the URL without credentials.
    """

    attempts: "tuple[str, ...]" = ()
    """What each try came to, and after how many seconds."""


class TokenIdError(TokenpipeError, ValueError):
    """A token id that does not fit the dtype or the vocabulary."""


class CertificateError(TokenpipeError, ValueError):
    """A certificate file that is cut, damaged, or none of ours."""


class DocumentError(TokenpipeError, ValueError):
    """A text file or line that cannot be read as a document; the message names file and line."""

    end: "int | None" = None
    """The byte of the file behind that line; None: not known."""


class DrawingError(TokenpipeError, RuntimeError):
    """A picture that cannot be made: graphviz's `dot` is missing, failed or took too long; Mermaid text needs none."""


class RankError(TokenpipeError, RuntimeError):
    """Other ranks did not answer in time, or are gone; the message names them."""


class WorkerError(TokenpipeError, RuntimeError):
    """A worker process that ended before its work was done, or an exception in one that cannot be raised as itself."""


class WorkerDiedError(WorkerError):
    """A batch while computing which three workers died; the message names the signal, the batch and the node."""


class WorkerStalledError(WorkerError):
    """A batch that two workers did not make in time; the message names batch and node, and shows the stack."""


class StateError(TokenpipeError, ValueError):
    """A state that is not one of ours, or is damaged."""


class StateMismatchError(StateError):
    """A sound state that belongs to another order; the message lists what differs."""


class JournalError(TokenpipeError, ValueError):
    """A change of the run that cannot be recorded."""


class SourceExhaustedError(TokenpipeError, RuntimeError):
    """A source with a cap is through, and `on_exhausted="error"` was asked for."""


class SourceGoneError(TokenpipeError, RuntimeError):
    """Tokens were asked for of a source that was dropped from the run and is no longer there."""


class LoaderError(TokenpipeError, RuntimeError):
    """A loader used out of turn."""


class IteratorInvalidatedError(LoaderError):
    """An iterator that a newer one, a seek or a loaded state has replaced."""


class LoaderShutdownError(LoaderError):
    """A loader that was shut down."""


class TokenFileWarning(UserWarning):
    """A token file can be read, but looks as if the dtype or the vocabulary were another."""


class LoaderWarning(UserWarning):
    """A call that has no effect here, or a graph with which ranks get wrong data."""
