"""A checkpoint's generation_config.json: what holds when a request says nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from north_jax.sampling import SamplingParams

from .sampling import SamplingDefaults


class GenerationConfigError(ValueError):
    """A generation_config.json that is malformed; the message names the file and the field."""


class GenerationConfig(msgspec.Struct, frozen=True):
    """The fields that are used; null and absent mean the same, others of the file are of no interest here."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def read(cls, file: Path) -> GenerationConfig:
        """Reads the file; an absent one says nothing. Raises GenerationConfigError."""
        try:
            config = msgspec.json.decode(file.read_bytes(), type=cls)
            config.sampling_defaults()
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise GenerationConfigError(f"{file}: {error}") from None
        return config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        named = self.eos_token_id
        return () if named is None else (named,) if isinstance(named, int) else tuple(named)

    def sampling_defaults(self) -> SamplingDefaults:
        """What the file says, and the model card's values where it is silent. Raises ValueError out of range."""
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.do_sample is False:
            given["temperature"] = 0.0
        defaults = SamplingDefaults(**given)
        SamplingParams(defaults.temperature, defaults.top_k, defaults.top_p, defaults.min_p)
        return defaults
