"""What a fork server imports once, so that its workers share the memory of it."""

import gc

from ...datapipes.kernels import load_kernels
from . import worker  # noqa: F401  # with torch and the datapipes

load_kernels()
gc.collect()
gc.freeze()  # else the first collection in each worker would copy the pages of all that was imported
