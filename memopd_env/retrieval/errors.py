"""What can go wrong between a query and its passages, as types.

An environment must tell a broken retriever from an empty answer, and an operator must read in the message what to do.
"""

from __future__ import annotations

from memopd_env.retrieval.base import RetrievalError


class RetrieverUnreachableError(RetrievalError):
    """No server answered at any of the addresses, after all retries."""


class RetrieverTimeoutError(RetrievalError):
    """A server was reached and did not answer in time."""


class RetrieverBusyError(RetrievalError):
    """The queue is full, or the index is still loading: the same request may succeed later."""


class BadRequestError(RetrievalError):
    """The request breaks a limit or has the wrong shape; sending it again cannot help."""


class BadReplyError(RetrievalError):
    """A server answered with something that is not the expected reply."""


class EncoderError(RetrievalError):
    """An encoder is missing, cannot be loaded, or produced vectors that are not finite numbers."""


class BrokenIndexError(RetrievalError):
    """An index folder is missing, damaged, or does not belong to its corpus or encoder."""


class NotEnoughMemoryError(RetrievalError):
    """Loading would not fit into the free memory; the message names what would."""


class NotEnoughDiskError(RetrievalError):
    """What is to be written would not fit on the disk, or did not."""


class DownloadError(RetrievalError):
    """A published file could not be fetched whole."""
