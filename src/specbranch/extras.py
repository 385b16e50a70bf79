"""Optional packages, each an extra of the installation: what needs them, and how they are installed.

Owns the table of extras, which pyproject.toml repeats. Invariant: a missing package is reported before work starts,
with the command that installs it. Nothing here imports any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from specbranch.errors import MissingPackage


@dataclass(frozen=True, slots=True)
class Extra:
    """A package, the extra that brings it, and what cannot be done without."""

    package: str
    name: str
    purpose: str
    imported_as: str | None = None  # if that is not the name of the package

    @property
    def is_installed(self) -> bool:
        """True if it can be imported."""
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:  # nor is what it is a part of
            return False

    @property
    def module(self) -> str:
        """What is imported of it."""
        return self.imported_as or self.package

    @property
    def command(self) -> str:
        """What installs it."""
        return f"pip install 'specbranch[{self.name}]'"

    def require(self, otherwise: str = "") -> None:
        """Raise unless it is installed; `otherwise` says how to do without."""
        if self.is_installed:
            return
        way = f"{self.command}; {otherwise}" if otherwise else self.command
        raise MissingPackage(f"{self.purpose} needs {self.package}, which is not installed. Install it with: {way}.")


OPTUNA = Extra("optuna", "tune", "Searching for a setting of several values")
ACCELERATE = Extra("accelerate", "transformers", "Running a GGUF file on transformers")
FASTAPI = Extra("fastapi", "serve", "Serving")
UVICORN = Extra("uvicorn", "serve", "Serving")
XLLAMACPP = Extra("xllamacpp", "llamacpp", "Running llama.cpp beside our methods")
LLGUIDANCE = Extra("llguidance", "grammar", "An answer that follows a schema or a grammar")
RAY = Extra("ray", "ray", "Running on Ray, as several replicas or as draft workers found by name,")
OTLP = "opentelemetry.exporter.otlp.proto.http"
OTEL = Extra("opentelemetry-exporter-otlp-proto-http", "otel", "Sending traces", OTLP)
EXTRAS = (OPTUNA, ACCELERATE, FASTAPI, UVICORN, XLLAMACPP, LLGUIDANCE, RAY, OTEL)
