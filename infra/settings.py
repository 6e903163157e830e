"""Settings: one TOML run file, overridden by `TAILRACE_*` environment variables, validated as a whole.

Services add their section through the entry point group `tailrace.settings`, so a typo anywhere in the file is an error
in every service, and this module names none of them.
"""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, create_model, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from infra.errors import UserError

PREFIX = "TAILRACE_"
CONFIG_VARIABLE = "TAILRACE_CONFIG"


class Section(BaseModel):
    """Base of a section: unknown keys are errors, numbers are finite, values are checked on assignment."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, frozen=True, allow_inf_nan=False)

    def task_pools(self) -> set[str]:
        """Pools of generators whose work queues the service publishes to or takes from."""
        return set()


class RunSettings(Section):
    """Which run this process belongs to."""

    name: str = Field("default", pattern=r"^[a-z0-9-]{1,40}$", description="run id; part of every subject")
    seed: int = Field(1, ge=0, lt=2**20, description="seed of the run's prompts and initial weights")
    environment: str = Field(
        "quick-facts",
        description="reverse-text, quick-facts, gym:NAME, jsonl:FILE, or tools:SECONDS:SIGMA: before one of them",
    )
    directory: Path = Field(Path("runs/default"), description="checkpoints and logs of the run are written here")


class NatsSettings(Section):
    """How to reach the NATS server."""

    url: str = Field("nats://127.0.0.1:4222", description="server address; several, comma-separated, for a cluster")
    user: str = Field("", description="user name; empty = no authentication")
    password: SecretStr = Field(SecretStr(""), description="password of the user")
    credentials: Path | None = Field(None, description="path of a .creds file, instead of user and password")
    connect_timeout: float = Field(20.0, gt=0, description="seconds to wait for the server at start")
    manage_streams: bool = Field(True, description="create streams and consumers at start where they are missing")

    @field_validator("url")
    @classmethod
    def _holds_no_secret(cls, url: str) -> str:
        if "@" in url:  # the address is logged and shown
            raise ValueError("must not contain a user or password; give nats.user and nats.password instead")
        return url


class TelemetrySettings(Section):
    """Logs; traces and metrics follow the standard OTEL_* variables."""

    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="lowest level that is written")
    directory: Path | None = Field(None, description="write spans and metrics as JSON lines to files in this folder")


class ServiceSettings(Section):
    """The life cycle of one service process."""

    instance: str = Field("", pattern=r"^[a-z0-9-]*$", description="name of this process; empty = host name and pid")
    http_host: str = Field("127.0.0.1", description="address of the health endpoints")
    http_port: int = Field(0, ge=0, le=65535, description="port of /healthz and /readyz; 0 = any free port")
    drain_seconds: float = Field(20.0, gt=0, description="longest time from SIGTERM to exit")
    liveness_seconds: float = Field(60.0, gt=0, description="/healthz fails when the main loop is silent for longer")
    heartbeat_seconds: float = Field(2.0, gt=0, description="interval of heartbeats and reports")


class Settings(BaseSettings):
    """Everything of the run file that is not a service's own section."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        nested_model_default_partial_update=True,
    )

    run: RunSettings = RunSettings()
    nats: NatsSettings = NatsSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    service: ServiceSettings = ServiceSettings()
    processes: dict[str, int] = Field(
        default_factory=dict,
        description="how many processes of each service, or service.role, the local supervisor starts",
    )

    def section(self, name: str) -> Any:
        """A service's section by its entry point name, e.g. `settings.section("learner")`."""
        return getattr(self, name)


def task_pools(settings: Settings) -> list[str]:
    """Every pool of generators that any section names."""
    sections = [settings.section(point.name) for point in entry_points(group="tailrace.settings")]
    return sorted(set[str]().union(*(section.task_pools() for section in sections)))


@cache
def schema() -> type[Settings]:
    """The whole run file: the sections above and those of every installed service."""
    sections: dict[str, Any] = {}
    for point in sorted(entry_points(group="tailrace.settings"), key=lambda p: p.name):
        section = point.load()
        sections[point.name] = (section, section())
    return create_model("RunFile", __base__=Settings, **sections)


def load(config: Path | None = None) -> Settings:
    """Read the run file (argument, else `TAILRACE_CONFIG`, else none) and the environment.

    Raises `UserError` naming the file or variable, the key and what is allowed there.
    """
    path = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    if path is not None:
        _check_toml(path)
    run_file = schema()
    _check_variables(run_file)

    class Loaded(run_file):  # type: ignore[misc, valid-type]
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], **sources: PydanticBaseSettingsSource
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            files = (TomlConfigSettingsSource(settings_cls, path),) if path else ()
            return (sources["env_settings"], *files)

    try:
        return Loaded()
    except ValidationError as error:
        raise UserError(_sentence(error, path)) from None
    except Exception as error:  # pydantic-settings wraps unparsable environment values in its own error
        raise UserError(f"settings: {error} (from {PREFIX}* variables or {path or 'no run file'})") from None


def _check_toml(path: Path) -> None:
    try:
        tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"run file {path}: {error.strerror}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"run file {path}: not TOML: {error}") from None


def _check_variables(run_file: type[Settings]) -> None:
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable != CONFIG_VARIABLE:
            section = variable.removeprefix(PREFIX).split("__")[0].lower()
            if section not in run_file.model_fields:
                known = ", ".join(f"{PREFIX}{name.upper()}__…" for name in run_file.model_fields)
                raise UserError(f"environment variable {variable}: no such section; known are {known}")


def _sentence(error: ValidationError, path: Path | None) -> str:
    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        message = re.sub(r"^Extra inputs are not permitted$", "no such setting", item["msg"])
        variable = PREFIX + key.upper().replace(".", "__")
        where = f"variable {variable}" if variable in os.environ else f"run file {path}" if path else "settings"
        secret = "password" in key or item["type"] == "extra_forbidden" or "@" in str(item["input"])
        parts.append(f"{where}: {key}: {message}" + ("" if secret else f", got {item['input']!r}"))
    return "; ".join(parts)
