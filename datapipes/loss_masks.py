"""Which tokens count as labels: a mask beside a token file, `FILE.loss`, one byte a token (1: counts, 0: does not).

That is datatrove's `X.ds.loss`, here for any kind of token file (chats of which the answers alone are learnt). A mask
is laid out as a token file of its own, so the gather of tokens copies rows of masks too, from the same places.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .errors import TokenFileError
from .formats import DTYPES, TokenLayout
from .formats.places import Url, beside, exists, find, loss_path, size_of, together
from .formats.table import distinct

__all__ = ["as_loss_mask", "has_loss_masks", "loss_layouts", "loss_path"]


def loss_layouts(files: Sequence[TokenLayout]) -> "tuple[TokenLayout, ...]":
    """The masks of token files, in their order: uint8, one a token, from byte 0 on.

    Raises TokenFileError for one that is missing, or has not one byte a token.
    """
    return tuple(together(_layout, files, [beside(file.path, ".loss") for file in files]))


def has_loss_masks(files: Sequence[TokenLayout]) -> bool:
    """Whether any of the files has a mask: then `loss_layouts` says which one has none."""
    if None not in (known := distinct(files, "has_loss")):  # a manifest knows
        return True in known
    masks = [beside(file.path, ".loss") for file in files]
    return any(together(exists, masks, masks))


def _layout(file: TokenLayout) -> TokenLayout:
    path = beside(file.path, ".loss")
    try:
        size = file.tokens if file.has_loss else size_of(path)
    except OSError as error:
        raise TokenFileError(error.errno, f"no loss mask of {file.path}: {error.strerror}", path) from error
    if size != file.tokens:
        raise TokenFileError(
            f"{path}: {size} bytes of loss mask for the {file.tokens} tokens of {file.path}; one byte a token would do"
        )
    if file.verify != "size" and not file.loss_digest:
        raise TokenFileError(
            f"{path}: is not in the manifest of its token file, so it cannot be compared (verify={file.verify!r}); "
            "make_manifest makes one that has it"
        )
    return TokenLayout(
        path, DTYPES["uint8"], 0, size, size, kind="loss mask", digest=file.loss_digest,
        whole_hash=file.loss_hash, verify=file.verify,
        remote=find(path) if isinstance(path, Url) else None,
    )  # fmt: skip


def as_loss_mask(values: "npt.NDArray[np.integer]", source: str = "") -> "npt.NDArray[np.bool_]":
    """Bytes of a mask, of any shape, as bool. Raises TokenFileError, naming `source`, for one not 0 or 1."""
    if values.size and (int(values.max()) > 1 or int(values.min()) < 0):
        wrong = int(values[(values > 1) | (values < 0)][0])
        raise TokenFileError(
            f"{source or 'a token file'}: its loss mask has a byte {wrong}; 0 and 1 alone say whether a token counts: "
            "the file is damaged, or is no mask"
        )
    return values.astype(np.bool_)
