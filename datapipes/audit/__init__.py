"""What was in step n, when was it seen, and is it what another run saw?"""

from .certificate import Certificate, batch_certificate, certify
from .ledger import ContentsRecord, RowDocument, WhenRecord

__all__ = ["Certificate", "ContentsRecord", "RowDocument", "WhenRecord", "batch_certificate", "certify"]
