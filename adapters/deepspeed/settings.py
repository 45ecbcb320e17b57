"""The settings below ``"datastates_ckpt"`` in DeepSpeed's JSON file."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from datastates.config import from_environment
from datastates.errors import SettingsError
from datastates.files.settings import FolderSettings

ENTRY = "datastates_ckpt"


class DeepSpeedSettings(FolderSettings):
    """Settings of DeepSpeed's checkpoints: fields of :class:`~datastates.files.settings.FolderSettings`, and more.

    In the JSON file, ``true``, ``null`` and ``{}`` mean the defaults.
    """

    enabled: bool = Field(True, description="false: save as DeepSpeed's own torch engine does, without this package.")
    host_cache_size: float | None = Field(
        None, gt=0, description="GiB of host memory that checkpoints stream through; in the place of host_cache."
    )

    @model_validator(mode="before")
    @classmethod
    def _host_cache_size(cls, given: Any) -> Any:
        size = given.get("host_cache_size")
        if size is None and "host_cache" not in given:
            size = from_environment(["host_cache_size"]).get("host_cache_size")
        if size is None:
            return given
        if "host_cache" in given:
            raise ValueError("host_cache_size: host_cache says the same; give one of them")
        try:
            return {**given, "host_cache": int(float(size) * (1 << 30))}
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"host_cache_size: {size!r:.40} is not a number of GiB") from None

    @classmethod
    def of_entry(cls, entry: object) -> DeepSpeedSettings:
        """Validate the entry of the JSON file; raises SettingsError, which names each invalid field."""
        if entry is None or entry is True:
            entry = {}
        if not isinstance(entry, dict):
            raise SettingsError(f"{ENTRY}: {entry!r:.40} is neither a JSON object nor true nor null")
        try:
            return cls.of(entry)
        except SettingsError as error:
            raise SettingsError(f"{ENTRY}: {error}") from None
