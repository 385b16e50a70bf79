"""Errors that users can cause, each a sentence: what was got, what was expected, what to do.

Owns the exception types; the CLI prints `str(error)` and exits with 2. A programming mistake is not one of these and
keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SpecBranchError(Exception):
    """Something the user can put right; the message says how."""


class BadParameter(SpecBranchError):
    """A value outside its range, or a name that does not exist."""


class ModelError(SpecBranchError):
    """A model that is missing, damaged or of a kind that cannot be used here."""


class UnsupportedArchitecture(ModelError):
    """A model the native decoder does not know; another runner may."""


class VocabularyMismatch(ModelError):
    """Draft and target do not speak the same tokens."""


class MissingPackage(SpecBranchError):
    """Something optional that is not installed."""


class CacheFull(SpecBranchError):
    """A sequence needs more KV slots than its cache has."""


class PoolFull(CacheFull):
    """The KV slots that all sequences share are taken; there is room once another one has ended."""


class DeadlinePassed(SpecBranchError):
    """A request was not finished in the time it was given."""


class RequestCancelled(SpecBranchError):
    """A request was let go before it was finished, by its caller or because the engine was closed."""


class ExchangeUnderWay(SpecBranchError):
    """A draft is being exchanged, so another cannot be exchanged yet."""


class EngineFailed(SpecBranchError):
    """The thread that owns the models met an error that belongs to no single request."""


class DownloadError(SpecBranchError):
    """A file could not be fetched, checked or stored."""


def not_finite(model: str) -> ModelError:
    """Build the error for a model whose scores are NaN or infinite."""
    return ModelError(
        f"The logits of {model} are not finite (NaN or infinity). Its weights are damaged, or too large for this "
        "precision: fetch the model again, or use another dtype."
    )


def engine_failure(error: BaseException) -> EngineFailed:
    """Build the error of a request that a mistake of the engine ended."""
    said = f"{type(error).__name__}: {error}".partition("\n")[0]
    return EngineFailed(f"The engine failed while it was at work ({said}). Send the request again.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest known name, or an empty string."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(what: str, name: str, known: Iterable[str]) -> BadParameter:
    """Build the error for a name that is not among the known ones."""
    names = sorted(known)
    return BadParameter(f"Unknown {what} {name!r}.{nearest(name, names)} Known: {', '.join(names)}.")
