"""What runs inside vLLM's own processes before anything else: they end with their parent and log as we do.

Registered under the entry point group `vllm.general_plugins`, which vLLM loads in every process it starts. It acts only
where this generator has asked for it by name in `VLLM_PLUGINS`.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys

NAME = "tailrace"

PR_SET_PDEATHSIG = 1


def register() -> None:
    """Let the kernel kill this process when the one that started it dies, however it dies."""
    parent = multiprocessing.parent_process()
    if os.environ.get("VLLM_PLUGINS") != NAME or parent is None:  # another vLLM, or the generator itself
        return
    from infra.telemetry import setup_logging

    setup_logging("warning", {"service": "generator", "process": multiprocessing.current_process().name})
    # A reload warns of what no checkpoint holds, such as rotary tables; that nothing else is missing has been checked.
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it died before
            os._exit(1)
