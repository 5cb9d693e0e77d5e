"""The deployment: batchrun.yaml, BATCHRUN_* and flags, read once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from batchrun.config.file import TINY_MODEL, DeploymentFile
from batchrun.errors import ConfigError
from batchrun.home import Home
from batchrun.yaml_lines import load_strict

DEFAULT_FILE = "batchrun.yaml"


class Environment(BaseSettings):
    """What BATCHRUN_* variables may set; flags come first, then these, then the file."""

    model_config = SettingsConfigDict(env_prefix="BATCHRUN_", extra="ignore", frozen=True)

    home: Path | None = None
    config: Path | None = None
    model: str | None = None
    listen: str | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment; nothing else."""
        return (init_settings, env_settings)


class Deployment(DeploymentFile):
    """A resolved deployment. `base` is the folder that relative paths in the file start from."""

    base: Path

    def model_folder(self, home: Home) -> Path | None:
        """The folder with the model's files, if they are on this machine; it may be yet to come."""
        if self.model == TINY_MODEL:
            return home.tiny_model
        folder = self.base / Path(self.model).expanduser()
        return folder if folder.is_dir() else None

    @property
    def store_url(self) -> str | None:
        """The URL of the store's database, with its password; None for the file in the home."""
        return None if self.store is None else self.store.get_secret_value()

    @property
    def runs_scheduler(self) -> bool:
        """Whether engines that batchrun starts run its own scheduler."""
        return self.policy != "vllm"

    @property
    def model_name(self) -> str:
        """The model id that callers use."""
        if self.served_model_name is not None:
            return self.served_model_name
        return self.model if not Path(self.model).is_absolute() else Path(self.model).name


def load_home(flag: Path | None) -> Home:
    """The home folder: --home, else BATCHRUN_HOME, else ~/.local/state/batchrun."""
    chosen = flag or _environment().home
    return Home(chosen or Path("~/.local/state/batchrun"))


def load_deployment(config: Path | None, **flags: str | None) -> Deployment:
    """Flags over BATCHRUN_* over the file (`config`, or ./batchrun.yaml when it exists).

    Raises ConfigError with file, line and key.
    """
    environment = _environment(**{key: value for key, value in flags.items() if value is not None})
    path = config or environment.config
    if path is None and Path(DEFAULT_FILE).exists():
        path = Path(DEFAULT_FILE)
    values: dict[str, Any] = {"base": Path.cwd() if path is None else path.absolute().parent}
    if path is not None:
        values |= load_strict(path, DeploymentFile, ConfigError).model_dump(exclude_unset=True)
    for key in ("model", "listen"):
        if getattr(environment, key) is not None:
            values[key] = getattr(environment, key)
    try:
        deployment = Deployment.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_first_line(error)) from error
    return _with_model_path(deployment)


def _environment(**flags: Any) -> Environment:
    try:
        return Environment(**flags)
    except ValidationError as error:
        raise ConfigError(_first_line(error)) from error


def _with_model_path(deployment: Deployment) -> Deployment:
    """A model that is a folder beside the file becomes an absolute path."""
    folder = deployment.base / Path(deployment.model).expanduser()
    looks_like_path = deployment.model.startswith((".", "/", "~"))
    if deployment.model != TINY_MODEL and (folder.is_dir() or looks_like_path):
        return deployment.model_copy(update={"model": os.path.normpath(folder)})
    return deployment


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message
