"""Runs hostile work: functions over model text, each in an unprivileged, killable process with hard limits."""

from infra.sandbox.pool import Limits, Sandbox, SandboxCrash, SandboxTimeout

__all__ = ["Limits", "Sandbox", "SandboxCrash", "SandboxTimeout"]
